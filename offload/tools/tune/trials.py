"""Trials as processes: the user's own program, run once for each tuning, with its order in a file.

Each is a process group of its own, which is killed as a whole, however the trial ends. All files
are in one directory that the caller removes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from offload.core.errors import ConfigError, FormatError, OffloadError
from offload.core.strict_json import printable
from offload.planning.profile import Tuning
from offload.planning.trial import ENVIRONMENT, TrialOrder, TrialResult, load_result
from offload.tools.child import last_lines, signal_group

_EVERY_S = 0.05  # between two polls of the process
_GRACE_S = 5.0  # for the process to end by itself when all is measured
_STOP_S = 3.0  # for the process to end after SIGTERM
_TAIL_BYTES, _TAIL_LINES = 1 << 14, 15


class TrialFailed(OffloadError):
    """A trial without a result. The message gives the cause, with the end of the program's stderr;
    `reason` is the cause in one line.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Program:
    """A program to run in trials. directory: of all trials' files. warm_up, steps: of each."""

    command: tuple[str, ...]
    directory: Path
    warm_up: int
    steps: int

    def run(
        self, number: int, tuning: Tuning, limit_s: float, tick: Callable[[float], None]
    ) -> TrialResult:
        """Run one trial. Blocks until it has ended; tick: called meanwhile with the seconds since
        its start. Raises `TrialFailed`, or `ConfigError` if the program cannot be started.
        """
        names = (f"{number}.{what}" for what in ("order.json", "result.json", "stderr"))
        order_path, result_path, stderr_path = (self.directory / name for name in names)
        order = TrialOrder(tuning, self.warm_up, self.steps, str(result_path))
        order.save(order_path)
        code, spent_s = self._carry_out(order_path, result_path, stderr_path, limit_s, tick)
        result = _read(result_path)
        if result is not None and result.is_whole:
            return result
        raise _failure(order, result, code, spent_s, _tail(stderr_path))

    def _carry_out(
        self,
        order_path: Path,
        result_path: Path,
        stderr_path: Path,
        limit_s: float,
        tick: Callable[[float], None],
    ) -> tuple[int | None, float]:
        """Run the program; return its exit code, None if it had to be killed, and its seconds."""
        with open(stderr_path, "wb") as stderr:
            process = _start(self.command, {**os.environ, ENVIRONMENT: str(order_path)}, stderr)
        try:
            begin_s, done_s = time.monotonic(), None
            while process.poll() is None:
                now_s = time.monotonic()
                if done_s is None and _is_whole(result_path):
                    done_s = now_s
                is_late = done_s is not None and now_s - done_s > _GRACE_S
                if is_late or now_s - begin_s > limit_s:
                    break
                tick(now_s - begin_s)
                time.sleep(_EVERY_S)
            return process.returncode, time.monotonic() - begin_s
        finally:
            _end(process)


def _start(
    command: Sequence[str], environment: dict[str, str], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{printable(command[0])}: cannot be started: {reason}; expected a program and its "
            "arguments behind --, as in `offload tune -- python train.py`"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group: SIGTERM first if the process still runs, SIGKILL in any case."""
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        finally:
            signal_group(process, signal.SIGKILL)
            process.wait()
    else:
        signal_group(process, signal.SIGKILL)  # workers of a loader may be left


def _is_whole(path: Path) -> bool:
    result = _read(path)
    return result is not None and result.is_whole


def _read(path: Path) -> TrialResult | None:
    try:
        return load_result(path)
    except FormatError as error:
        raise FormatError(f"{error}; the program that is tuned runs another version") from error


def _failure(
    order: TrialOrder, result: TrialResult | None, code: int | None, spent_s: float, tail: str
) -> TrialFailed:
    done = 0 if result is None else result.steps_done
    told = f"after {done} of {order.steps_needed} steps"
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    said = f"; the end of its stderr:\n{tail}" if lines else "; it wrote nothing to stderr"
    if code is None:
        text = f"the program did not end within {spent_s:.0f} s, {told}"
        return TrialFailed(f"{text}; raise --minutes, or lower --steps{said}", text)
    if code:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        reason = lines[-1] if lines else f"ended {how}"
        return TrialFailed(f"the program ended {how}, {told}{said}", reason)
    if result is None:
        text = "the program ended without a call of offload.prepare or offload.wrap"
        return TrialFailed(f"{text}; give one that trains with one of them", text)
    text = f"the program ended {told}"
    return TrialFailed(
        f"{text} ({order.warm_up} to warm up, {order.steps} to measure); let it run for more, or "
        "lower --steps and --warm-up",
        text,
    )


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        lines = last_lines(file, _TAIL_BYTES)
    return "\n".join(f"  {printable(line)}" for line in lines[-_TAIL_LINES:])
