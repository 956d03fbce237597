"""Run the tests: `python tests/run.py quick|test|torture [options of pytest]`.

Two parts, one after the other, each with both cores busy: tests on the host, and tests on the fake
accelerator, which is registered for the life of a process. The second runs whatever became of the
first. The last lines tell what was run, how long it took and how many of each kind of trial (kills,
schedules, ...) it had.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
WORKERS = os.environ.get("OFFLOAD_TEST_WORKERS", str(os.cpu_count() or 1))
# Files in the order of collection, which is longest first, each as a whole to one worker.
SPREAD = ["-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder"]
NO_TESTS = 5  # pytest's exit code where none was chosen


@dataclass(frozen=True)
class Part:
    name: str
    options: list[str]


PARTS = [
    Part("host", ["-m", "not device", f"--ignore={TESTS / 'device'}", *SPREAD]),
    Part("device", ["-m", "device", str(TESTS / "device"), *SPREAD]),
]


def run(part: Part, loop: str, options: list[str], counts: Path) -> int:
    """Run one part; its pytest writes what it has counted to `counts`."""
    environment = {**os.environ, "OFFLOAD_LOOP": loop, "OFFLOAD_TEST_COUNTS": str(counts)}
    command = [sys.executable, "-m", "pytest", "-q", *part.options, *options]
    code = subprocess.run(command, cwd=TESTS.parent, env=environment).returncode
    return 0 if code == NO_TESTS else code


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(loop: str, options: list[str]) -> int:
    codes, lines, counted = [], [], Counter[str]()
    for part in PARTS:
        begin, cpu_begin_s = time.monotonic(), cpu_s()
        with tempfile.TemporaryDirectory() as folder:
            counts = Path(folder) / "counts.json"
            codes.append(run(part, loop, options, counts))
            if counts.exists():
                counted.update(json.loads(counts.read_text()))
        told = f"{time.monotonic() - begin:.0f} s, {cpu_s() - cpu_begin_s:.0f} s of CPU"
        lines.append(f"{part.name}: {'FAILED' if codes[-1] else 'passed'} in {told}")
        if codes[-1] == 2:  # interrupted
            break
    print(f"\noffload, loop {loop}:", *lines, sep="\n  ")
    print("  ran " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(counted.items())))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
