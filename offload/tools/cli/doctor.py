"""`offload doctor`: shows what this machine can do, what is degraded, and how to mend it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

import offload
from offload.core.drive_facts import read_directory
from offload.core.host_facts import read_machine
from offload.integrations.screen import encodable
from offload.tools.judgement import Row, Severity, examine
from offload.tools.output import EXIT_PROBLEM, count_statuses, print_result, results, table

SUMMARY: Final = "Show what this machine can do, what is degraded, and how to mend it."
_COLOURS: Final = {Severity.OK: "32", Severity.DEGRADED: "33", Severity.MISSING: "31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload doctor [DIRECTORY] [--json]`."""
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        nargs="?",
        type=parse_directory,
        help="a directory for swapped bytes to examine as well; it must exist and stays as it is",
    )


def parse_directory(text: str) -> Path:
    """Return the argument as a path. Refuses only what can be no path: '', or text with a NUL."""
    if not text:
        raise argparse.ArgumentTypeError(
            "expected a directory, got ''; leave it out to examine the machine alone"
        )
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path without NUL characters, got {text!r}")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Examine the machine and print the diagnosis; return 1 if any row is `missing`, else 0."""
    directory = None if args.directory is None else read_directory(args.directory)
    rows = examine(read_machine(), directory)
    if args.json:
        print_result(as_json(rows))
    else:
        with results() as stream:
            write_table(rows, stream)
    return exit_code(rows)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if any row is MISSING; DEGRADED rows still yield 0."""
    return EXIT_PROBLEM if any(row.status is Severity.MISSING for row in rows) else 0


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """Build the object that `--json` prints. Keys are stable: scripts rely on them."""
    return {
        "version": offload.__version__,
        "rows": [asdict(row) for row in rows],
        "summary": {**count_statuses(Severity, rows), "exit_code": exit_code(rows)},
    }


# --- the table ------------------------------------------------------------------------------------


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with colours, and NO_COLOR (https://no-color.org) is
    not set.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table. A path may hold characters that this terminal cannot show."""
    stream.write(encodable(format_table(rows, colour=wants_colour(stream)) + "\n", stream))


def format_table(rows: Sequence[Row], colour: bool = False) -> str:
    """Format name, status and value of each row; where it is not OK also the reason and advice."""
    width = max(map(len, Severity))
    cells = []
    for row in rows:
        cells.append((row.name, f"{row.status:<{width}}", row.value))
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


def summarize(rows: Sequence[Row]) -> str:
    """Format the last line: the counts, and a verdict."""
    counts = count_statuses(Severity, rows)
    numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
    if counts["missing"]:
        return f"{numbers}: offload cannot run like this; mend what is missing."
    if counts["degraded"]:
        return f"{numbers}: offload runs here, not at its best."
    return f"{numbers}: all is well."
