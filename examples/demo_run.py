"""The runs of `make demo`: processes of train_gpt.py, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from memory_limit import PROGRAM, Limit

EXAMPLE = Path(__file__).parent / "train_gpt.py"
RUN_S, START_S = 900.0, 60.0  # deadlines: of a run, and of a process on its way to its limit
POLL_S = 0.01
# Two threads take as much memory everywhere; where they spin, a busy machine is slow.
DEFAULTS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
FORCED = {"CUDA_VISIBLE_DEVICES": ""}


class Run:
    """A process of train_gpt.py under a limit, the lines that it notes, and its peak memory.

    peak_bytes: the most memory that it has had, without files that are mapped: libraries, too.
    """

    def __init__(self, name: str, folder: Path, limit: Limit, options: list[str]) -> None:
        self.name, self.limit, self.peak_bytes = name, limit, 0
        self._log, self._said = folder / f"{name}.log", folder / f"{name}.txt"
        self._kills_before = limit.kills()
        command = [sys.executable, PROGRAM, limit.argument, EXAMPLE, f"--log={self._log}", *options]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env={**DEFAULTS, **os.environ, **FORCED},
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process: it never outlives this one."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        show_progress("")

    def start(self) -> None:
        """Let the script begin, once the kernel says that the process is under the limit."""
        end_s = time.monotonic() + START_S
        while not self.limit.holds(self._process.pid):
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(
                    f"{self.name}: not under its limit ({self.limit.about})\n{self.tail}"
                )
            time.sleep(POLL_S)
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def lines(self) -> list[dict[str, Any]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    @property
    def seconds(self) -> list[float]:
        """The times of all steps but the first one."""
        return [line["seconds"] for line in self.steps()[1:]]

    @property
    def end_text(self) -> str:
        reason = self.memory_failure() or "not for want of memory"
        code = self._process.returncode
        return f"{self.name}: train_gpt.py ended with {code}, {reason}\n{self.tail}"

    @property
    def tail(self) -> str:
        return "\n".join(self._said.read_text(errors="replace").splitlines()[-12:])

    def end(self) -> int:
        """Watch the process to its end; return its exit code."""
        for _ in self._watch():
            pass
        return self._process.returncode

    def finish(self) -> None:
        if self.end() != 0:
            raise SystemExit(self.end_text)

    def kill_in_step(self, number: int) -> None:
        """Kill the process half-way through that step."""
        for steps in self._watch():
            if len(steps) >= number - 1:
                time.sleep(steps[-1]["seconds"] / 2)
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
                return
        raise SystemExit(self.end_text)

    def memory_failure(self) -> str | None:
        """Return how the process, which has ended, ran out of memory; None: it did not."""
        said = self._said.read_text(errors="replace")
        return self.limit.failure(self._process.returncode, said, self._kills_before)

    def _watch(self) -> Iterator[list[dict[str, Any]]]:
        end_s = time.monotonic() + RUN_S
        while self._process.poll() is None:
            if time.monotonic() > end_s:
                raise SystemExit(f"{self.name}: not done after {RUN_S:.0f} s\n{self.tail}")
            self.peak_bytes = max(self.peak_bytes, taken_bytes(self._process.pid))
            steps = self.steps()
            last = (
                f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.3f}" if steps else "starting"
            )
            show_progress(f"   {self.name}: {last}, peak {self.peak_bytes >> 20} MiB")
            yield steps
            time.sleep(POLL_S)


def taken_bytes(pid: int) -> int:
    """Return the memory that a process has now, as the kernel counts it; 0: it has ended.

    Without mapped files, which are the page cache's. Where there is no /proc: all that is resident.
    """
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def show_progress(text: str) -> None:
    """Overwrite the last line of a terminal; say nothing elsewhere."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:columns]:<{columns}}\r", end="", flush=True)
