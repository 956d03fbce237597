"""Run the tests: `python tests/run.py quick|test|torture [options of pytest]`.

Two parts at the same time: tests on the host, and tests on the fake accelerator, which is
registered for the life of a process. The host part has three workers for two cores, the device part
has one: tests wait for disks, children and deadlines, and leave their core to others meanwhile.
What the second part prints comes after the first has ended. The last lines tell what was run, how
long it took and how many of each kind of trial (kills, schedules, ...) it had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CORES = os.cpu_count() or 1
WORKERS = os.environ.get("OFFLOAD_TEST_WORKERS", str(CORES + CORES // 2))
# Files in the order of collection, which is longest first, each as a whole to one worker.
SPREAD = ["--dist", "loadfile", "--no-loadscope-reorder"]
HOST = ["-m", "not device", f"--ignore={TESTS / 'device'}", "-n", WORKERS, *SPREAD]
DEVICE = ["-m", "device", str(TESTS / "device"), "-n", "1", *SPREAD]
NO_TESTS = 5  # pytest's exit code where none was chosen


class Part:
    """A pytest that runs. What it has counted is in `folder` at its end, and what it prints, too,
    unless it is `shown` at once.
    """

    def __init__(
        self, name: str, chosen: list[str], loop: str, folder: Path, shown: bool = False
    ) -> None:
        self.name = name
        self._printed = folder / f"{name}.txt"
        self._counts = folder / f"{name}.json"
        environment = {**os.environ, "OFFLOAD_LOOP": loop, "OFFLOAD_TEST_COUNTS": str(self._counts)}
        command = [sys.executable, "-m", "pytest", "-q", *chosen]
        with open(self._printed, "wb") as file:
            out = None if shown else file
            self._process = subprocess.Popen(
                command, cwd=TESTS.parent, env=environment, stdout=out, stderr=out
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def counted(self) -> dict[str, int]:
        return json.loads(self._counts.read_text()) if self._counts.exists() else {}


def wait_for_one() -> tuple[int, int, float]:
    """The next child that ends: its number, its exit code, and its seconds of CPU. Ctrl-C goes to
    the children as well, and ends them.
    """
    while True:
        try:
            pid, status, used = os.wait4(-1, 0)
            return pid, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        except KeyboardInterrupt:
            continue


def main(loop: str, options: list[str]) -> int:
    begin_s = time.monotonic()
    lines, failed, counted = [], False, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = Part("host", HOST + options, loop, folder, shown=True)
        device = Part("device", DEVICE + options, loop, folder)
        running = {part.pid: part for part in (host, device)}
        while running:
            pid, code, cpu_s = wait_for_one()
            part = running.pop(pid)
            became = "passed" if code in (0, NO_TESTS) else f"FAILED ({code})"
            failed |= code not in (0, NO_TESTS)
            took_s = time.monotonic() - begin_s
            lines.append(f"{part.name}: {became} after {took_s:.0f} s, {cpu_s:.0f} s of CPU")
        sys.stdout.write(device.printed())
        for part in (host, device):
            counted.update(part.counted())
    print(f"\noffload, loop {loop}:", *lines, sep="\n  ")
    print("  ran " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(counted.items())))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
