"""`offload doctor`: shows what this machine can do, what is degraded, and how to mend it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from offload.core.drive_facts import read_directory
from offload.core.host_facts import read_machine
from offload.tools.doctor.diagnosis import as_json, exit_code, write_table
from offload.tools.doctor.judgement import examine
from offload.tools.output import print_json, results

SUMMARY: Final = "Show what this machine can do, what is degraded, and how to mend it."


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
        print_json(as_json(rows))
    else:
        with results() as stream:
            write_table(rows, stream)
    return exit_code(rows)
