"""`offload selftest`: proves the engine on this machine, and ends with a table for a bug report.

Exit code 0: all checks that ran have passed; 1: a check has failed, the others still ran; 2: the
checks could not be run. They run in another process (`offload.tools.selftest.supervisor`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import offload
from offload.tools.output import EXIT_PROBLEM, count_statuses, print_result, status_line, table
from offload.tools.selftest.check import GROUPS, CheckResult, CheckStatus, Setting, choose
from offload.tools.selftest.supervisor import CheckResults, supervise

SUMMARY: Final = "Prove the engine on this machine in a few minutes; exit code 1: something failed."
DEFAULT_SEED: Final = 20261116
_MOST_SEED: Final = 2**32
EPILOG: Final = """\
example:
  offload selftest --nvme /mnt/nvme0/swap
  offload selftest --quick --only kernels,faults.io_uring --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    `offload selftest [--device D] [--nvme DIR] [--quick] [--only NAMES] [--seed N] [--json]`
    """
    parser.add_argument(
        "--device", default="auto", help="auto (the accelerator that torch has), cpu, cuda, ..."
    )
    parser.add_argument(
        "--nvme",
        metavar="DIR",
        type=_directory,
        help="a directory on the drive to try; left as it was (else: that of temporary files)",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: half a minute")
    parser.add_argument(
        "--only", metavar="NAMES", help=f"checks or groups, with commas: {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--seed", type=_seed, default=DEFAULT_SEED, help="of all that is drawn (%(default)s)"
    )


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a directory, got ''; or leave --nvme out")
    return Path(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= _MOST_SEED:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**32, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print the table; return 1 if one has failed, else 0."""
    folder = Path(tempfile.gettempdir()) if args.nvme is None else args.nvme
    setting = Setting(args.device, folder, args.quick, args.seed)
    begin_s = time.monotonic()

    def begin(name: str, number: int, count: int) -> None:
        text = f"[{number}/{count}] {time.monotonic() - begin_s:5.0f} s  {name}"
        (line.update if line.is_terminal else line.say)(text)

    with status_line() as line:
        findings = supervise(choose(args.only), setting, begin)
    about = {"offload": offload.__version__, **findings.about, **_how(args)}
    told = as_json(about, findings) if args.json else [format_table(about, findings.results)]
    print_result(told)
    return EXIT_PROBLEM if findings.has_failed else 0


def _how(args: argparse.Namespace) -> dict[str, str]:
    """Return the rows that tell how to repeat this run: the seed and the arguments."""
    words = ["--quick"] if args.quick else []
    words += [] if args.only is None else ["--only", args.only]
    words += ["--device", args.device] if args.device != "auto" else []
    words += [] if args.nvme is None else ["--nvme DIR"]
    return {"seed": str(args.seed), "arguments": " ".join(words) or "none"}


def as_json(about: dict[str, str], findings: CheckResults) -> dict[str, Any]:
    """Build the object that `--json` prints. Keys are stable: scripts rely on them."""
    return {
        "version": offload.__version__,
        "about": about,
        "checks": [asdict(result) for result in findings.results],
        "summary": {
            **count_statuses(CheckStatus, findings.results),
            "exit_code": EXIT_PROBLEM if findings.has_failed else 0,
        },
    }


# --- the table at the end, to paste into a bug report --------------------------------------------


def format_table(about: Mapping[str, str], results: Sequence[CheckResult]) -> str:
    """Format the facts about the machine, each check with its result, and the verdict as plain
    text.
    """
    checks = [
        (each.name, f"{each.status:<7}", f"{each.seconds:6.1f} s", _told(each)) for each in results
    ]
    facts = table([*about.items()])
    return "\n".join(["offload selftest", "", *facts, "", *table(checks), "", summarize(results)])


def _told(result: CheckResult) -> str:
    return f"{result.count:,} {result.text}" if result.status is CheckStatus.PASSED else result.text


def summarize(results: Sequence[CheckResult]) -> str:
    """Return the last line: the counts, the seconds and the verdict."""
    counts = count_statuses(CheckStatus, results)
    numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
    text = f"{numbers}, in {sum(result.seconds for result in results):.0f} s"
    if any(result.status is CheckStatus.FAILED for result in results):
        return f"{text}: do not trust results here; please report this table."
    if all(result.status is CheckStatus.NOT_RUN for result in results):
        return f"{text}: nothing was proved."
    return f"{text}: all that ran is right."
