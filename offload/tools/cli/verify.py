"""`offload verify`: checks every byte of checkpoints against checksums. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Final, TextIO

from offload.checkpoint.format.verify import Verdict, verify
from offload.core.config import format_size
from offload.core.errors import OffloadError
from offload.core.strict_json import printable, shown
from offload.tools.output import complain, results

SUMMARY: Final = "Check every byte of a checkpoint; exit code 0: whole, 1: damaged."
EXIT_DAMAGED: Final = 1
EXIT_ERROR: Final = 2

_SHOWN: Final = 10  # findings that are printed for one checkpoint
_EVERY_S: Final = 0.2
_WIDTH: Final = 79


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload verify PATH [PATH ...] [--json]`."""
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="the directory of a checkpoint; it is only read",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with a list, no lines of text"
    )


def run(args: argparse.Namespace) -> int:
    """Check the checkpoints, print the findings, and return the highest exit code of all paths."""
    told: list[dict[str, object]] = []
    codes = [_check(path, told if args.json else None) for path in args.paths]
    if args.json:
        with results() as stream:
            print(json.dumps({"checkpoints": told}), file=stream)
    return max(codes)


def _check(path: str, told: list[dict[str, object]] | None) -> int:
    """Check one checkpoint and return its exit code. told: the list that receives the result for
    JSON; None: the result is printed.
    """
    line = VerifyProgress(sys.stderr, printable(path))
    try:
        findings = verify(path, line.report)
    except OffloadError as error:
        line.end()
        complain(str(error))
        if told is not None:
            told.append({"path": path, "whole": None, "error": str(error)})
        return EXIT_ERROR
    except BaseException:
        line.end()
        raise
    line.end()
    if told is not None:
        told.append(as_json(findings))
        return 0 if findings.is_whole else EXIT_DAMAGED
    with results() as stream:
        for text in describe(findings):
            encoding = stream.encoding or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    return 0 if findings.is_whole else EXIT_DAMAGED


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


class VerifyProgress:
    """A progress line, redrawn in place on a terminal; without a terminal it prints nothing."""

    def __init__(self, stream: TextIO | None, label: str) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._label = label
        self._told_s = float("-inf")
        self._begin_s = time.monotonic()

    def report(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if self._stream is None or now_s - self._told_s < _EVERY_S:
            return
        self._told_s = now_s
        speed = format_size(int(done_bytes / max(now_s - self._begin_s, 1e-3)))
        share = done_bytes / max(total_bytes, 1)
        text = f"{share:4.0%} of {format_size(total_bytes)}, {speed}/s: {self._label}"
        self._write(f"\r{text[:_WIDTH]:<{_WIDTH}}")

    def end(self) -> None:
        """Erase the progress line, if there is one."""
        if self._stream is not None and self._told_s > float("-inf"):
            self._write("\r" + " " * _WIDTH + "\r")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: characters that the terminal cannot encode
            self._stream = None
