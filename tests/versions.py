"""`make versions`: what depends on the version of torch, on each release in its own environment.

The environments are `.venv-torch-<release>` in this checkout, made if they are not there. Other
Pythons get one with the first of the releases. All output is in `build/versions`; a table ends it.
Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

RELEASES = ("2.13.0", "2.14.1", "2.15.0")  # the last one of each known version
OTHER_PYTHONS = ("python3.11", "python3.12", "python3.13")

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "versions"
BUILD_TOOLS = ("scikit-build-core>=0.10", "nanobind>=2.2", "cmake>=3.18,<5", "ninja")
ENVIRONMENT_GB = 5.5  # with a CUDA build, which is what PyPI has for Linux; the download is half
LOG_LINES = 40  # of a failure

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
# What is run, in the order of the table's columns.
CHECKS = {
    "names": [*PYTEST, "tests/test_torch_names.py"],
    "bits": [
        *PYTEST,
        "tests/kernels/test_exact_bits.py",
        "tests/kernels/test_updates.py",
        "tests/kernels/test_stats_and_casts.py",
    ],
    "training": [*PYTEST, "tests/optim/test_wrap.py", "tests/params/test_prepare.py"],
    "device": [
        *PYTEST,
        "-mdevice",
        "tests/device/test_transfer.py",
        "tests/device/test_wrap_device.py",
    ],
    "quick": ["tests/run.py", "quick"],
    "selftest": ["-m", "offload", "selftest", "--quick", "--device", "cpu"],
}
COUNTED = ("failed", "error", "errors", "passed", "skipped", "not run")
LOOPS = {"bits": "torture"}  # the contract in its long form; all else as in `make test`
# The line that ends a run of pytest, and that of the selftest.
COUNTS = re.compile(r"^=* ?((?:\d+ [a-z ]+, )*\d+ [a-z ]+),? in \d")


@dataclass
class Row:
    """One environment, and what came of its checks by column."""

    interpreter: str  # which it is made with
    release: str  # of torch
    path: Path
    torch: str = ""
    python: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def executable(self) -> str:
        return str(self.path / "bin" / "python")

    @property
    def name(self) -> str:
        return self.path.name.removeprefix(".venv-")


# --- what to run on -------------------------------------------------------------------------------


def rows_for(only: str | None, pythons: Sequence[str] | None) -> list[Row]:
    """Return a row for this Python with each release, then for other Pythons with the first one.
    pythons: None means those that are found, unless one release alone is asked for.
    """
    releases = [only] if only else list(RELEASES)
    rows = [Row(sys.executable, release, ROOT / f".venv-torch-{release}") for release in releases]
    asked = pythons if pythons is not None else (() if only else OTHER_PYTHONS)
    seen = {version_of(sys.executable)}
    for name in asked:
        version = version_of(name)
        if version is None and pythons is not None:
            sys.exit(f"make versions: {name} does not run; give the path of a Python")
        if version is None or version in seen:
            continue
        seen.add(version)
        path = ROOT / f".venv-torch-{releases[0]}-python{version}"
        rows.append(Row(name, releases[0], path))
    return rows


def version_of(interpreter: str) -> str | None:
    """Return the version, as "3.12", of an interpreter that runs. A name on the PATH may be a shim
    for one that is not there.
    """
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", program], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def announce(rows: Sequence[Row]) -> None:
    """Say what it will take, before anything is fetched."""
    missing = [row for row in rows if not row.path.exists()]
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    print(f"make versions: {', '.join(row.name for row in rows)}")
    if missing:
        print(
            f"make versions: {len(missing)} environments are to be made; each with a CUDA build of "
            f"torch takes {ENVIRONMENT_GB} GB of disk ({len(missing) * ENVIRONMENT_GB:.0f} GB in "
            f"all, {free_gb:.0f} GB are free) and half of that from PyPI; they are kept",
            flush=True,
        )


# --- environments ---------------------------------------------------------------------------------


def set_up(row: Row) -> None:
    """Make the environment or bring it up to date, with the native core of this checkout."""
    if not row.path.exists():
        call([row.interpreter, "-m", "venv", str(row.path)])
    pip = [row.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    held = f"torch=={row.release}"
    call([*pip, held, *BUILD_TOOLS])
    # Not where `make` builds: what CMake remembers is of one environment.
    build = f"build-dir=build/{row.name}"
    call([*pip, "--no-build-isolation", "-C", build, held, "-e", ".[test,plots,integration]"])
    program = "import platform, torch; print(torch.__version__, platform.python_version())"
    done = subprocess.run(
        [row.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    row.torch, row.python = done.stdout.split()


def call(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


# --- checks ---------------------------------------------------------------------------------------


def run(row: Row, check: str) -> None:
    """Run one check; its cell says what came of it."""
    begin_s = time.monotonic()
    log = LOGS / f"{row.name}-{check}.log"
    environment = {**os.environ, "OFFLOAD_LOOP": LOOPS.get(check, "test")}
    with log.open("w") as file:
        code = subprocess.run(
            [row.executable, *CHECKS[check]],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        ).returncode
    lines = log.read_text().splitlines()
    row.cells[check] = cell_of(lines, code)
    seconds = time.monotonic() - begin_s
    print(f"{row.name}: {check}: {row.cells[check]}, in {seconds:.0f} s", flush=True)
    if code:
        row.has_failed = True
        print("\n".join(lines[-LOG_LINES:]), flush=True)


def cell_of(lines: Sequence[str], code: int) -> str:
    """Sum up what was counted, over all parts of a run; libraries may print behind the last line of
    it.
    """
    counts = Counter[str]()
    for found in filter(None, map(COUNTS.match, lines)):
        for part in found[1].split(", "):
            number, kind = part.split(" ", 1)
            counts[kind] += int(number)
    shown = [f"{counts[kind]} {kind}" for kind in COUNTED if counts[kind]]
    return ", ".join([f"FAILED ({code})"] * bool(code) + shown) or "nothing"


# --- the table ------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Show torch, Python and every column, in lines of one width."""
    lines = [["torch", "Python", *CHECKS]]
    for row in rows:
        cells = [row.cells.get(check, "-") for check in CHECKS]
        lines.append([row.torch or row.release, row.python or "-", *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="RELEASE", help="one release of torch: 2.15.0")
    parser.add_argument("--pythons", metavar="NAMES", help='other Pythons: "python3.12 /x/python"')
    args = parser.parse_args(arguments)
    rows = rows_for(args.only or None, args.pythons.split() if args.pythons else None)
    announce(rows)
    LOGS.mkdir(parents=True, exist_ok=True)
    for row in rows:
        try:
            set_up(row)
        except subprocess.CalledProcessError as error:
            row.cells, row.has_failed = {"names": "no environment"}, True
            print(f"{row.name}: {error}", flush=True)
            continue
        for check in CHECKS:
            run(row, check)
    print(table(rows))
    return int(any(row.has_failed for row in rows))


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
