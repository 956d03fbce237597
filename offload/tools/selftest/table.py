"""The table at the end of a self test, to paste into a bug report. Needs no torch."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from offload.tools.selftest.check import CheckResult, CheckStatus

WIDTH: Final = 100


def format_table(about: Mapping[str, str], results: Sequence[CheckResult]) -> str:
    """Format the facts about the machine, each check with its result, and the verdict as plain
    text.
    """
    lines = ["offload selftest", ""]
    name_width = max(map(len, about), default=0)
    for name, text in about.items():
        lines += _row(f"{name:<{name_width}}  ", text)
    lines.append("")
    check_width = max((len(result.name) for result in results), default=0)
    for result in results:
        head = f"{result.name:<{check_width}}  {result.status.value:<7}  {result.seconds:6.1f} s  "
        lines += _row(head, _told(result))
    return "\n".join([*lines, "", summarize(results)])


def _told(result: CheckResult) -> str:
    return f"{result.count:,} {result.text}" if result.status is CheckStatus.PASSED else result.text


def _row(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    ) or [head.rstrip()]


def count_statuses(results: Sequence[CheckResult]) -> dict[str, int]:
    """Count the checks of each status, zeros included."""
    counts = Counter(result.status for result in results)
    return {status.value: counts[status] for status in CheckStatus}


def summarize(results: Sequence[CheckResult]) -> str:
    """Return the last line: the counts, the seconds and the verdict."""
    numbers = ", ".join(f"{count} {status}" for status, count in count_statuses(results).items())
    seconds = sum(result.seconds for result in results)
    text = f"{numbers}, in {seconds:.0f} s"
    if any(result.status is CheckStatus.FAILED for result in results):
        return f"{text}: do not trust results here; please report this table."
    if all(result.status is CheckStatus.NOT_RUN for result in results):
        return f"{text}: nothing was proved."
    return f"{text}: all that ran is right."
