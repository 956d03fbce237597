"""A diagnosis: rows with a status, printed as a table for users and as JSON for scripts."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final, TextIO

import offload

WIDTH: Final = 100  # columns of the table


class Severity(Enum):
    """The status of a row: what it means for training on this machine."""

    OK = "ok"  # probed, and works
    DEGRADED = "degraded"  # works in a slower or narrower way, or could not be probed
    MISSING = "missing"  # cannot work


@dataclass(frozen=True)
class Row:
    """A line of the diagnosis. advice: None exactly when the status is OK."""

    name: str
    status: Severity
    value: str
    why: str
    advice: str | None


def make_row(
    name: str, value: str, why: str, advice: str | None, status: Severity | None = None
) -> Row:
    """Make a row. status: None means OK if there is no advice, else DEGRADED."""
    if status is None:
        status = Severity.OK if advice is None else Severity.DEGRADED
    return Row(name, status, value, why, advice)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if any row is MISSING; DEGRADED rows still yield 0."""
    return int(any(row.status is Severity.MISSING for row in rows))


def count_statuses(rows: Sequence[Row]) -> dict[str, int]:
    """Count the rows of each status, zeros included."""
    counts = Counter(row.status for row in rows)
    return {status.value: counts[status] for status in Severity}


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """Build the object that `--json` prints. Keys are stable: scripts rely on them."""
    return {
        "version": offload.__version__,
        "rows": [{**asdict(row), "status": row.status.value} for row in rows],
        "summary": {**count_statuses(rows), "exit_code": exit_code(rows)},
    }


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with colours, and NO_COLOR (https://no-color.org) is
    not set.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


_COLOURS = {Severity.OK: "32", Severity.DEGRADED: "33", Severity.MISSING: "31"}


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table: at most WIDTH columns, advice below the rows that need it."""
    text = format_table(rows, colour=wants_colour(stream)) + "\n"
    # A path may hold characters that this terminal cannot show; that must not end the diagnosis.
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def format_table(rows: Sequence[Row], colour: bool = False) -> str:
    """Format name, status and value of each row; where it is not OK also the reason and advice."""
    name_width = max(len(row.name) for row in rows)
    status_width = max(len(status.value) for status in Severity)
    margin = " " * (name_width + status_width + 4)
    lines: list[str] = []
    for row in rows:
        status = row.status.value.ljust(status_width)
        first, *others = _wrap(row.value, margin)
        if colour:
            status = f"\x1b[{_COLOURS[row.status]}m{status}\x1b[0m"
        lines += [f"{row.name.ljust(name_width)}  {status}  {first.strip()}", *others]
        if row.advice is not None:
            lines += _wrap(f"why: {row.why}", margin) + _wrap(f"do:  {row.advice}", margin)
    return "\n".join([*lines, "", summarize(rows)])


def _wrap(text: str, margin: str) -> list[str]:
    """Wrap text at WIDTH columns; flags such as --gpus are not broken at their hyphens."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    ) or [margin]


def summarize(rows: Sequence[Row]) -> str:
    """Format the last line: the counts, and a verdict."""
    counts = count_statuses(rows)
    numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
    if counts["missing"]:
        return f"{numbers}: offload cannot run like this; mend what is missing."
    if counts["degraded"]:
        return f"{numbers}: offload runs here, not at its best."
    return f"{numbers}: all is well."
