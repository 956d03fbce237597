"""A diagnosis: rows with a status, printed as a table for users and as JSON for scripts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TextIO

import offload
from offload.integrations.screen import encodable
from offload.tools.output import count_statuses, table


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


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """Build the object that `--json` prints. Keys are stable: scripts rely on them."""
    return {
        "version": offload.__version__,
        "rows": [{**asdict(row), "status": row.status.value} for row in rows],
        "summary": {**_count(rows), "exit_code": exit_code(rows)},
    }


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with colours, and NO_COLOR (https://no-color.org) is
    not set.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


_COLOURS = {Severity.OK: "32", Severity.DEGRADED: "33", Severity.MISSING: "31"}


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table. A path may hold characters that this terminal cannot show."""
    stream.write(encodable(format_table(rows, colour=wants_colour(stream)) + "\n", stream))


def format_table(rows: Sequence[Row], colour: bool = False) -> str:
    """Format name, status and value of each row; where it is not OK also the reason and advice."""
    width = max(len(status.value) for status in Severity)
    cells = []
    for row in rows:
        cells.append((row.name, f"{row.status.value:<{width}}", row.value))
        if row.advice is not None:
            cells += [("", "", f"why: {row.why}"), ("", "", f"do:  {row.advice}")]
    lines = table(cells)
    if colour:
        begin = max(len(row.name) for row in rows) + 2
        lines = [_coloured(line, begin, begin + width) for line in lines]
    return "\n".join([*lines, "", summarize(rows)])


def _coloured(line: str, begin: int, end: int) -> str:
    """Colour the status of a row, which stands at [begin, end) of its first line."""
    if line.startswith(" "):
        return line
    code = _COLOURS[Severity(line[begin:end].rstrip())]
    return f"{line[:begin]}\x1b[{code}m{line[begin:end]}\x1b[0m{line[end:]}"


def _count(rows: Sequence[Row]) -> dict[str, int]:
    return count_statuses(Severity, (row.status for row in rows))


def summarize(rows: Sequence[Row]) -> str:
    """Format the last line: the counts, and a verdict."""
    counts = _count(rows)
    numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
    if counts["missing"]:
        return f"{numbers}: offload cannot run like this; mend what is missing."
    if counts["degraded"]:
        return f"{numbers}: offload runs here, not at its best."
    return f"{numbers}: all is well."
