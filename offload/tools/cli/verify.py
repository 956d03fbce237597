"""`offload verify`: checks every byte of checkpoints against checksums. Needs no torch."""

from __future__ import annotations

import argparse
import time
from typing import Final

from offload.checkpoint.format.verify import Verdict, verify
from offload.core.config import format_size
from offload.core.errors import OffloadError
from offload.core.strict_json import printable, shown
from offload.tools.output import EXIT_ERROR, EXIT_PROBLEM, complain, print_result, status_line

SUMMARY: Final = "Check every byte of a checkpoint; exit code 0: whole, 1: damaged."

_SHOWN: Final = 10  # findings that are printed for one checkpoint
_EVERY_S: Final = 0.2  # between two updates of the status line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload verify PATH [PATH ...] [--json]`."""
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="the directory of a checkpoint; it is only read",
    )


def run(args: argparse.Namespace) -> int:
    """Check the checkpoints, print the findings, and return the highest exit code of all paths."""
    told, code = [], 0
    for path in args.paths:
        try:
            findings = _verify(path)
        except OffloadError as error:
            complain(str(error))
            told.append({"path": path, "whole": None, "error": str(error)})
            code = EXIT_ERROR
            continue
        told.append(as_json(findings))
        code = code if findings.is_whole else max(code, EXIT_PROBLEM)
        if not args.json:
            print_result(describe(findings))
    if args.json:
        print_result({"checkpoints": told})
    return code


def _verify(path: str) -> Verdict:
    """Check one checkpoint, with a status line that has the share and the speed."""
    begin_s = time.monotonic()

    def report(done_bytes: int, total_bytes: int) -> None:
        speed = format_size(int(done_bytes / max(time.monotonic() - begin_s, 1e-3)))
        share = done_bytes / max(total_bytes, 1)
        line.update(f"{share:4.0%} of {format_size(total_bytes)}, {speed}/s: {printable(path)}")

    with status_line(_EVERY_S) as line:
        return verify(path, report)


def as_json(findings: Verdict) -> dict[str, object]:
    """Build the JSON object of a checkpoint. damage: the first findings; damages: their number."""
    manifest = findings.manifest
    return {
        "path": str(findings.path),
        "whole": findings.is_whole,
        "damages": findings.damages,
        "damage": findings.damage,
        "foreign": findings.foreign,
        "checked_bytes": findings.checked_bytes,
        "number": None if manifest is None else manifest.number,
        "tensors": None if manifest is None else len(manifest.tensors),
        "files": None if manifest is None else len(manifest.files),
    }


def describe(findings: Verdict) -> list[str]:
    """Return the lines of the result: the damage, the foreign files, and the verdict if whole."""
    path = printable(findings.path)
    lines = [f"{path}: damaged: {text}" for text in findings.damage[:_SHOWN]]
    if findings.damages > _SHOWN:
        lines.append(f"{path}: damaged: and {findings.damages - _SHOWN} places more")
    if findings.foreign:
        more = ", ..." if len(findings.foreign) > _SHOWN else ""
        names = ", ".join(map(shown, findings.foreign[:_SHOWN]))
        lines.append(f"{path}: does not belong to the checkpoint, not looked at: {names}{more}")
    if findings.is_whole and findings.manifest is not None:
        manifest = findings.manifest
        lines.append(
            f"{path}: whole: number {manifest.number}, {len(manifest.tensors)} tensors in "
            f"{len(manifest.files)} files, {format_size(findings.checked_bytes)} checked"
        )
    return lines
