"""The table at the end of a self test, to paste into a bug report. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.tools.output import count_statuses, table
from offload.tools.selftest.check import CheckResult, CheckStatus


def format_table(about: Mapping[str, str], results: Sequence[CheckResult]) -> str:
    """Format the facts about the machine, each check with its result, and the verdict as plain
    text.
    """
    checks = [
        (each.name, f"{each.status.value:<7}", f"{each.seconds:6.1f} s", _told(each))
        for each in results
    ]
    facts = table([*about.items()])
    return "\n".join(["offload selftest", "", *facts, "", *table(checks), "", summarize(results)])


def _told(result: CheckResult) -> str:
    return f"{result.count:,} {result.text}" if result.status is CheckStatus.PASSED else result.text


def count(results: Sequence[CheckResult]) -> dict[str, int]:
    return count_statuses(CheckStatus, (result.status for result in results))


def summarize(results: Sequence[CheckResult]) -> str:
    """Return the last line: the counts, the seconds and the verdict."""
    numbers = ", ".join(f"{count} {status}" for status, count in count(results).items())
    seconds = sum(result.seconds for result in results)
    text = f"{numbers}, in {seconds:.0f} s"
    if any(result.status is CheckStatus.FAILED for result in results):
        return f"{text}: do not trust results here; please report this table."
    if all(result.status is CheckStatus.NOT_RUN for result in results):
        return f"{text}: nothing was proved."
    return f"{text}: all that ran is right."
