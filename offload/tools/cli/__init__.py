"""The command line interface: `offload COMMAND ...`.

Each command is a module of this package with the members of `Command`, and has a line in
`COMMANDS`. Exit codes: 0 success, 1 the command has found a problem, 2 it could not do its work
(bad arguments, an `OffloadError`, a stdout that cannot be written to), 130 interrupted. Results go
to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import offload
from offload.core.errors import OffloadError
from offload.tools.cli import bench, doctor, export, plan, report, selftest, tune, verify
from offload.tools.output import EXIT_ERROR, OutputError, complain, drop, results

EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it


class Command(Protocol):
    """The interface of a command, which a module of this package implements."""

    @property
    def SUMMARY(self) -> str:
        """The one line of `offload --help` that describes the command. The end of its own help is
        `EPILOG`, if the module has one.
        """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work, print to `results()`, return the exit code. May raise OffloadError."""


COMMANDS: Final[Mapping[str, Command]] = {
    "bench": bench,
    "doctor": doctor,
    "export": export,
    "plan": plan,
    "report": report,
    "selftest": selftest,
    "tune": tune,
    "verify": verify,
}


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands. In its result `args.command` is the module to run."""
    parser = argparse.ArgumentParser(
        prog="offload", description="Train models larger than memory in an unchanged PyTorch loop."
    )
    parser.add_argument("--version", action="version", version=f"offload {offload.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.SUMMARY,
            epilog=getattr(command, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object, no text")
        sub.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` is without the program's name.

    Raises SystemExit, as argparse does, for bad arguments, `--help` and `--version`.
    """
    try:
        with results() as stream:  # before any work: raises if there is no stdout
            try:
                args = make_parser().parse_args(argv)
            except SystemExit:
                stream.flush()  # what --help and --version have printed
                raise
        command: Command = args.command
        return command.run(args)
    except OutputError as error:
        complain(str(error))
        drop(sys.stdout)
        return EXIT_ERROR
    except OffloadError as error:
        complain(str(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe (`offload doctor | head`)
        drop(sys.stdout)
        return EXIT_ERROR
