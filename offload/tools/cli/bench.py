"""`offload bench`: measures this machine and writes a profile that `plan` and `tune` read.

All requests that cannot work are refused before the first measurement. The measurements are in
`offload.tools.bench`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import offload
from offload.core.config import format_size
from offload.core.drive_facts import DirectoryFacts, read_directory
from offload.core.errors import CapacityError, ConfigError, FormatError, OffloadError
from offload.core.host_facts import read_accelerator, read_memory, read_torch
from offload.core.portable import refused
from offload.core.strict_json import printable
from offload.planning import profile
from offload.planning.profile import Profile
from offload.tools.bench.figure import BenchProgress, SurveyPart
from offload.tools.output import EXIT_ERROR, complain, print_result, status_line, table

if TYPE_CHECKING:
    from offload.tools.bench.survey import BenchRequest, SurveyResult

SUMMARY: Final = "Measure this machine: memory, update, drives, copies, products, a training step."
FIRST_GIB, FURTHER_GIB = 11, 16  # written at most: with one directory; for each further one
SUSTAINED_GB: Final = 64.0
MOST_SECONDS: Final = 600.0
_EVERY_S: Final = 0.1  # between two updates of the status line

EPILOG: Final = f"""\
Drives wear by writing: a run with one directory writes at most {FIRST_GIB} GiB to it, each further
directory costs at most {FURTHER_GIB} GiB more; --sustained writes GB to each directory beside that,
and a little more. The files have no names and are gone when it ends, however it ends.

example:
  offload bench /mnt/nvme0 /mnt/nvme1
  offload bench /mnt/nvme0 --only disk --sustained 100 --output drive.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments.

    `offload bench [DIR ...] [--sustained [GB]] [--seconds S] [--only PARTS] [--output FILE]`;
    `--json`: print one JSON object.
    """
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        help="directories for swapped bytes, one on each drive; without any, no drive is measured",
    )
    parser.add_argument(
        "--sustained",
        metavar="GB",
        nargs="?",
        type=_positive("GB; name directories before --sustained", 4.0, 1e6),
        const=SUSTAINED_GB,
        help="also write so much to each directory, to see how fast it is when its cache is full "
        f"({SUSTAINED_GB:.0f} if GB is left out)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=_positive("seconds", 0.01, MOST_SECONDS),
        help="how long one figure is measured, about (1 if left out)",
    )
    parser.add_argument(
        "--only", metavar="PARTS", help=f"measure some parts only, of {','.join(SurveyPart)}"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the profile there, not to the machine's own"
    )


def _positive(what: str, least: float, most: float) -> Any:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g} {what}, got {text!r}")
        return value

    return parse


def run(args: argparse.Namespace) -> int:
    """Check the arguments, measure, write the profile, print the figures; return the exit code."""
    directories = check_directories(args.directories)
    parts = parse_parts(args.only, bool(directories), args.sustained is not None)
    target = check_target(args.output)
    _warn_of_strangers(target, load_known(target))
    wanted = _make_request(args, directories, parts)
    # Before the first line: what comes after it can be interrupted, an import only with noise.
    from offload.tools.bench.survey import make_profile, survey

    nbytes = format_size(wanted.most_written_bytes)
    with status_line(_EVERY_S) as line:
        line.say(f"writes at most {nbytes} to drives" if directories else "writes to no drive")
        found = survey(wanted, BenchProgress(line))
    # Loaded again: another process may have written tunings in the meantime.
    before, today = load_known(target), date.today().isoformat()
    made = make_profile(found, before, read_memory(), read_accelerator(), today)
    code = 0
    saved: Path | None = target
    try:
        _save(made, target)
    except OffloadError as error:  # show the figures all the same: they may have taken long
        complain(str(error))
        code, saved = EXIT_ERROR, None
    tell = as_json if args.json else describe
    print_result(tell(found, wanted, made, saved))
    return code


def _make_request(
    args: argparse.Namespace, directories: Sequence[DirectoryFacts], parts: frozenset[SurveyPart]
) -> BenchRequest:
    """Build the request. Raises `CapacityError` if a directory has too little free space, and
    `ConfigError` if torch cannot be imported.
    """
    told = read_torch()
    if told.error is not None:
        raise ConfigError(f"bench: torch cannot be imported ({told.error}); see `offload doctor`")
    # Imported here, because other commands must work where torch does not.
    from offload.tools.bench import sizes
    from offload.tools.bench.survey import BenchRequest

    chosen = sizes.DEFAULT
    if args.seconds is not None:
        chosen = replace(chosen, seconds=args.seconds)
    if args.sustained is not None:
        chosen = replace(chosen, sustained_bytes=int(args.sustained * 1e9))
    wanted = BenchRequest(parts, tuple(found.path for found in directories), chosen)
    if wanted.most_written_bytes:
        _check_room(directories, chosen.room_bytes())
    return wanted


def describe(
    found: SurveyResult, wanted: BenchRequest, made: Profile, saved: Path | None
) -> list[str]:
    """Return the lines of the table and, after them, the notes on the measurements."""
    rows = [("machine", made.name)]
    rows += [(printable(figure.name), str(figure)) for figure in found.figures]
    if found.step is not None and found.step.stall_share is not None:
        rows.append(("  waited", f"{found.step.stall_share:.0%} of these iterations"))
    if wanted.most_written_bytes:
        size, most = format_size(found.written_bytes), format_size(wanted.most_written_bytes)
        rows.append(("written to drives", f"{size} of at most {most}"))
    where = "not written" if saved is None else printable(saved)
    count = len(made.tuned)
    kept = f", with the {count} tuning{'s' if count > 1 else ''} it had" if count and saved else ""
    rows.append(("profile", where + kept))
    return table(rows, width=None) + [f"note: {printable(note)}" for note in found.notes]


def as_json(
    found: SurveyResult, wanted: BenchRequest, made: Profile, saved: Path | None
) -> dict[str, Any]:
    return {
        "version": offload.__version__,
        "path": None if saved is None else str(saved),
        "profile": made.to_dict(),
        "figures": [asdict(figure) for figure in found.figures],
        "step": found.step.to_dict() if found.step else None,
        "notes": found.notes,
        "written_bytes": found.written_bytes,
        "most_written_bytes": wanted.most_written_bytes,
    }


# --- checks of the arguments ----------------------------------------------------------------------


def parse_parts(
    text: str | None, has_directories: bool, is_sustained: bool
) -> frozenset[SurveyPart]:
    """Return the parts to measure: those of `--only`, else all that these arguments allow."""
    names = {name.strip() for name in text.split(",")} if text is not None else set(SurveyPart)
    if text is None and not has_directories:
        names.remove(SurveyPart.DISK)
    unknown = sorted(names - set(SurveyPart))
    if unknown:
        raise ConfigError(
            f"--only: expected some of {','.join(SurveyPart)}, got {', '.join(map(ascii, unknown))}"
        )
    if SurveyPart.DISK in names and not has_directories:
        raise ConfigError("--only disk: name at least one directory on the drive")
    if is_sustained and SurveyPart.DISK not in names:
        raise ConfigError("--sustained: measures drives; name a directory, and disk in --only")
    return frozenset(map(SurveyPart, names))


def check_directories(texts: Sequence[str]) -> list[DirectoryFacts]:
    """Return the facts about the directories. Raises `ConfigError` unless each exists, is named
    once, and can hold new files. Warns of one in memory.
    """
    found = [_check_directory(text) for text in texts]
    paths = [directory.path for directory in found]
    if len(set(paths)) < len(paths):
        names = ", ".join(printable(path) for path in paths)
        raise ConfigError(f"directories: expected each once, got {names}")
    for directory in found:
        if directory.ram_backed:
            complain(
                f"{printable(directory.path)} lies in memory: its figures are no drive's", "warning"
            )
    return found


def _check_directory(text: str) -> DirectoryFacts:
    if not text or "\0" in text:
        raise ConfigError(f"directory: expected a path, got {text!r}")
    name, found = printable(text), read_directory(Path(text))
    if not found.exists:
        raise ConfigError(f"{name}: is not there; make the directory, or mount the drive")
    if found.error == "ENOTDIR":
        raise ConfigError(f"{name}: is not a directory; give the directory itself")
    if not found.writable:
        remedy = {
            "EROFS": "mount it for writing, or name another",
            "ENOSPC": "no room is left: make some, or name another",
            "EDQUOT": "your quota is used up: make room, or name another",
        }.get(str(found.error), "let your user write there, or name another")
        raise ConfigError(f"{name}: no file can be made there ({found.error}); {remedy}")
    return found


def _check_room(directories: Sequence[DirectoryFacts], needed_bytes: int) -> None:
    for directory in directories:
        free = directory.free_bytes
        if free is not None and free < needed_bytes:
            raise CapacityError(
                f"{printable(directory.path)}: the measurement needs {format_size(needed_bytes)} "
                f"({needed_bytes} bytes) for a while, {format_size(free)} ({free} bytes) are "
                "free; make room, or give --sustained less"
            )


# --- the profile's file ---------------------------------------------------------------------------


def check_target(output: str | None) -> Path:
    """Return the path of the profile to write, after checks that it can be. Creates nothing yet."""
    if output is not None and (not output or "\0" in output):
        raise ConfigError(f"--output: expected a file, got {output!r}")
    path = profile.own_path() if output is None else Path(output)
    parent = path.parent
    if output is None:  # missing directories will be made
        parent = next((each for each in path.parents if os.path.lexists(each)), parent)
    if not parent.is_dir():
        raise ConfigError(f"{printable(path)}: {printable(parent)} is not a directory; make it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{printable(path)}: nothing can be written to {printable(parent)}; allow it, or name "
            "another file with --output"
        )
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise ConfigError(f"{printable(path)}: expected a new or an ordinary file")
    return path


def load_known(path: Path) -> Profile | None:
    """Load the profile that the file has now; None if there is no file. Raises `FormatError` for a
    file that is no profile, so that it is not overwritten.
    """
    if not os.path.lexists(path):
        return None
    try:
        return profile.load(path)
    except FormatError as error:
        raise FormatError(f"{error}; move it away, or name another with --output") from error


def _warn_of_strangers(path: Path, known: Profile | None) -> None:
    if known is not None and not known.is_of_this_machine:
        complain(
            f"{printable(path)} is of another machine ({printable(known.cpu)}, {known.cores} "
            f"cores): it will be replaced, with its {len(known.tuned)} tunings",
            "warning",
        )


def _save(made: Profile, path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise refused(path.parent, "make", error, remedy="name --output") from error
    made.save(path)
