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
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.loops import NAMES, settings

TESTS = Path(__file__).resolve().parent
CORES = os.cpu_count() or 1
WORKERS = os.environ.get("OFFLOAD_TEST_WORKERS", str(CORES + CORES // 2))
# Files in the order of collection, which is longest first, each as a whole to one worker.
SPREAD = ["--dist", "loadfile", "--no-loadscope-reorder"]
HOST = ["-m", "not device", f"--ignore={TESTS / 'device'}", "-n", WORKERS, *SPREAD]
DEVICE = ["-m", "device", str(TESTS / "device"), "-n", "1", *SPREAD]
NO_TESTS = 5  # pytest's exit code where none was chosen


class Part:
    """A process of pytest. At its end `folder` has what it has counted, and what it printed, too,
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


class Stop(BaseException):
    """The exception for Ctrl-C, or SIGTERM: what a time-out, a cancelled CI or a stopped container
    sends.
    """


def stop(*_: object) -> None:
    raise Stop


def wait_for_one(running: dict[int, Part]) -> tuple[Part, int, float]:
    """Wait for the next part that ends; return it, its exit code, and its seconds of CPU. Told to
    stop, interrupt all parts as Ctrl-C does, with what they have to tell so far.
    """
    while True:
        try:
            pid, status, used = os.wait4(-1, 0)
        except Stop:
            for pid in running:
                os.kill(pid, signal.SIGINT)
            continue
        cpu_s = used.ru_utime + used.ru_stime
        return running.pop(pid), os.waitstatus_to_exitcode(status), cpu_s


def main(loop: str, options: list[str]) -> int:
    begin_s = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    codes, lines, counted = [], [], Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = Part("host", HOST + options, loop, folder, shown=True)
        device = Part("device", DEVICE + options, loop, folder)
        running = {part.pid: part for part in (host, device)}
        while running:
            part, code, cpu_s = wait_for_one(running)
            codes.append(code)
            became = {0: "passed", NO_TESTS: "no tests"}.get(code, f"FAILED ({code})")
            took_s = time.monotonic() - begin_s
            lines.append(f"{part.name}: {became} after {took_s:.0f} s, {cpu_s:.0f} s of CPU")
        sys.stdout.write(device.printed())
        for part in (host, device):
            counted.update(part.counted())
    print(f"\noffload, loop {loop}:", *lines, sep="\n  ")
    print("  ran " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(counted.items())))
    if set(codes) == {NO_TESTS}:
        return NO_TESTS
    return int(any(code not in (0, NO_TESTS) for code in codes))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python tests/run.py {'|'.join(NAMES)} [options of pytest]", file=sys.stderr)
        sys.exit(2)
    print(f"offload: loop {sys.argv[1]}, {settings()}", flush=True)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
