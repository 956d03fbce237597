"""`offload report`: shows a run as an HTML page, a picture or a timeline. Needs no torch.

The traces are only read. Every file that it writes is complete or absent, and only its owner may
read it: a page has everything that is in the trace, names of parameters included.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from offload.core.config import format_size
from offload.core.errors import ConfigError
from offload.core.portable import write_private
from offload.core.strict_json import printable
from offload.telemetry.figures import key_figures, memory_of
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.run_file import Run, load
from offload.telemetry.words import show_part, show_seconds, show_share
from offload.tools.html_report import make_page, make_picture, to_perfetto
from offload.tools.output import print_result

SUMMARY: Final = "Make one HTML page of a run, or of two beside each other, from their traces."

EPILOG: Final = """\
example:
  In the training script, at the end:  offload.report(optimizer).save_trace("run.json")
  Then:                                offload report run.json -o run.html
  Two runs beside each other:          offload report before.json after.json -o both.html
  A figure for a paper:                offload report run.json --png step.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload report TRACE [OTHER] [-o FILE] [--png FILE] [--chrome FILE] [--json]`."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=parse_path,
        help="what offload.report(...).save_trace(path) wrote; it is only read",
    )
    parser.add_argument(
        "other", metavar="OTHER", nargs="?", type=parse_path, help="a second one, to compare with"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=parse_path,
        help="the page; default: TRACE with the ending .html, unless --png, --chrome or --json "
        "asks for something else",
    )
    parser.add_argument(
        "--png", metavar="FILE", type=parse_path, help="a picture of one iteration, 300 dpi"
    )
    parser.add_argument(
        "--chrome",
        metavar="FILE",
        type=parse_path,
        help="a timeline for ui.perfetto.dev or chrome://tracing, with memory as counters",
    )


def parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected the path of a file, got {text!r}")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Read the traces, make all files, write them, print a summary; return the exit code. Writes
    nothing if one of the files cannot be made.
    """
    paths = [path for path in (args.trace, args.other) if path is not None]
    targets = find_targets(args)
    check_targets(targets, paths)
    runs = [load(path) for path in paths]
    made = {kind: make(kind, runs, paths) for kind in targets}
    for kind, content in made.items():
        write_private(targets[kind], content)
    tell = as_json if args.json else describe
    print_result(tell(runs, paths, targets))
    return 0


def find_targets(args: argparse.Namespace) -> dict[str, Path]:
    """Return the paths of the files to make, by kind: page, png, chrome. The default is a page."""
    asked = {"page": args.output, "png": args.png, "chrome": args.chrome}
    targets = {kind: path for kind, path in asked.items() if path is not None}
    return targets if targets or args.json else {"page": args.trace.with_suffix(".html")}


def check_targets(targets: dict[str, Path], traces: Sequence[Path]) -> None:
    """Raise `ConfigError` if two files would have the same path, or one would replace a trace.
    Comes before any file is read.
    """
    taken = {os.path.realpath(path): "a trace that is read" for path in traces}
    for kind, path in targets.items():
        place = os.path.realpath(path)
        if place in taken:
            raise ConfigError(
                f"report: {printable(path)} is to be the {kind}, but it is {taken[place]}; "
                "name another file"
            )
        taken[place] = f"the {kind} as well"


def make(kind: str, runs: Sequence[Run], paths: Sequence[Path]) -> str | bytes:
    names = [path.name for path in paths]
    if kind == "page":
        return make_page(runs, names)
    if kind == "png":
        return make_picture(runs, names)
    return json.dumps(to_perfetto(runs, names), allow_nan=False)


def describe(runs: Sequence[Run], paths: Sequence[Path], targets: dict[str, Path]) -> list[str]:
    """Return the lines of the result: one for each run, then one for each file."""
    lines = []
    for run, path in zip(runs, paths, strict=True):
        one = run.iterations
        moved = (
            f"{format_size(round(one.moved.get(f'disk_{what}_bytes', 0)))} {what}"
            for what in ("read", "written")
        )
        part = "an iteration (median)" if one.is_whole else "in step()"
        worst = next(iter(one.stalls), None)
        most = f", most: {printable(show_part(worst))}" if worst and one.stalls[worst] else ""
        lines.append(
            f"{printable(path)}: {one.steps} steps, {show_seconds(one.typical_s)} {part}, "
            f"{show_share(one.stall_share)} waiting{most}, {' and '.join(moved)}"
        )
    return lines + [f"{kind}: {printable(path)}" for kind, path in targets.items()]


def as_json(runs: Sequence[Run], paths: Sequence[Path], targets: dict[str, Path]) -> dict[str, Any]:
    told = [
        {
            "trace": str(path),
            "title": run.about.title,
            "date": run.about.date,
            **run.iterations.to_dict(),
            "memory": {
                tier: {"bytes": one.nbytes, "is": one.what, "budget_bytes": one.budget_bytes}
                for tier, one in memory_of(RunFacts.of(run)).items()
            },
            "hints": {
                figure.name: [hint._asdict() for hint in figure.hints]
                for figure in key_figures(RunFacts.of(run))
                if figure.hints
            },
        }
        for run, path in zip(runs, paths, strict=True)
    ]
    return {"runs": told, "files": {kind: str(path) for kind, path in targets.items()}}
