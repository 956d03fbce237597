"""Runs checks in a process of their own, and survives it.

A check that ends that process (a signal, an exit) or does not end in time is a failure; the others
then run in a new one. Whatever happens here, Ctrl-C included, that process and all that it has
started are killed, and the directory is removed. Needs no torch.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from offload.core.errors import ConfigError, StateError, StoreError
from offload.tools.selftest.check import CheckResult, CheckStatus

LIMIT_S = 240.0  # of one check
START_LIMIT_S = 240.0  # until the first begins: torch is imported
_LAST_BYTES = 2000  # of what a process has said before it died

# Name of the check that begins, its number, how many there are.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SelftestRequest:
    """What is to be done. parent: a directory in which one is made for the checks."""

    names: Sequence[str]
    device: str
    parent: Path
    is_quick: bool
    seed: int


@dataclass
class CheckResults:
    """about: of the machine, by name. results: in the order of the request."""

    about: dict[str, str] = field(default_factory=dict)
    results: list[CheckResult] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return any(result.status is CheckStatus.FAILED for result in self.results)


def supervise(
    request: SelftestRequest, progress: Progress, limit_s: float = LIMIT_S
) -> CheckResults:
    """Run all checks. Raises `ConfigError` where the device or the directory cannot be used, and
    `StateError` where no process can be started that does it.
    """
    findings = CheckResults()
    with _ended_by_signals(), _scratch(request.parent) as directory:
        while left := [*request.names][len(findings.results) :]:
            before = len(findings.results)
            with _CheckProcess(request, left, directory) as worker:
                fate = _follow(worker, request, findings, progress, limit_s)
            if fate is not None:
                name = left[len(findings.results) - before]
                findings.results.append(CheckResult(name, CheckStatus.FAILED, worker.since_s, fate))
    return findings


def _follow(
    worker: _CheckProcess,
    request: SelftestRequest,
    findings: CheckResults,
    progress: Progress,
    limit_s: float,
) -> str | None:
    """Hear what it tells until it ends. Returns what went wrong with the check that had begun;
    None: nothing.
    """
    begun = ""
    for message in worker.messages(limit_s):
        if "refused" in message:
            raise ConfigError(message["refused"])
        if "about" in message:
            findings.about = message["about"]
        if "begin" in message:
            begun = message["begin"]
            progress(begun, len(findings.results) + 1, len(request.names))
        if "result" in message:
            findings.results.append(CheckResult.of_dict(message["result"]))
            begun = ""
    if len(findings.results) == len(request.names):
        return None
    fate = worker.fate()
    if not begun:
        raise StateError(f"selftest: the process that runs the checks {fate}")
    return f"its process {fate}"


class _CheckProcess:
    """The process, in a group of its own. Leaving the block kills the whole group."""

    def __init__(self, request: SelftestRequest, names: Sequence[str], directory: Path) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._fd, out = os.pipe()
        self._rest = b""
        self._is_late = False
        self._begin_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "offload.tools.selftest.worker", str(out)],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=(out,),
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            os.close(self._fd)
            raise
        finally:
            os.close(out)
        self._ask(request, names, directory)

    def _ask(self, request: SelftestRequest, names: Sequence[str], directory: Path) -> None:
        asked = {
            "names": list(names),
            "device": request.device,
            "directory": str(directory),
            "parent": str(request.parent),
            "is_quick": request.is_quick,
            "seed": request.seed,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(asked) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died already; `fate` says of what

    @property
    def since_s(self) -> float:
        """Since the last that it has told."""
        return time.monotonic() - self._begin_s

    def messages(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Until its end, or until nothing has come for `limit_s`, from the first check on."""
        has_begun = False
        while True:
            self._begin_s = time.monotonic()
            wait_s = limit_s if has_begun else START_LIMIT_S
            ready, _, _ = select.select([self._fd], [], [], wait_s)
            self._is_late = not ready
            data = os.read(self._fd, 1 << 16) if ready else b""
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            for message in map(json.loads, whole):
                has_begun = has_begun or "begin" in message
                yield message

    def fate(self) -> str:
        """What became of it, and what it said last."""
        if self._is_late:
            text = f"had not ended after {self.since_s:.0f} s"
        else:
            text = f"ended with {self._end()}"
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _LAST_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return text + (f"; it said: {lines[-1]}" if lines else "")

    def _end(self) -> str:
        """How it ended. It stays a zombie, so that its group's number is nobody else's."""
        end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        if end.si_code == os.CLD_EXITED:
            return f"exit code {end.si_status}"
        return signal.Signals(end.si_status).name

    def __enter__(self) -> _CheckProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it had not read
            self._process.stdin.close()
        os.close(self._fd)
        self._said.close()


def _environment() -> dict[str, str]:
    """Matrix products that repeat themselves on CUDA; and threads that do not spin while others
    compute, where small steps would take ten times as long on a busy machine. The user's own
    settings stay.
    """
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**ours, **os.environ}


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A directory of our own, removed in the end."""
    if not parent.is_dir():
        raise ConfigError(f"--nvme: {parent} is not a directory; make it, or give another")
    try:
        directory = Path(tempfile.mkdtemp(prefix="offload-selftest-", dir=parent)).resolve()
    except OSError as error:
        raise StoreError(
            f"--nvme: {parent} cannot be written to: {error.strerror}; allow it, or give another",
            errno=error.errno,
            operation="mkdir",
            file=str(parent),
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that it is left in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {}
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                before[number] = signal.signal(number, interrupt)
    except ValueError:
        pass  # in a thread other than the first, where signals do not come either
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
