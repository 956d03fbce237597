"""Runs checks in a worker process, and survives its crashes.

A check that ends the worker (by a signal or an exit) or does not end in time is a failure; the
other checks then run in a new worker. In the end, after errors and Ctrl-C too, the worker and all
processes that it has started are killed, and the directory is removed. Needs no torch.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from offload.core.errors import ConfigError, StateError, StoreError
from offload.core.strict_json import printable
from offload.tools.child import ended_by_signals, last_lines, signal_group
from offload.tools.selftest.check import CheckResult, CheckStatus, Setting

LIMIT_S = 240.0  # of one check
START_LIMIT_S = 240.0  # until the first begins: torch is imported
_LAST_BYTES = 2000  # of the output of a worker that has died

# Called with the name of the check that begins, its number, and the number of all checks.
Progress = Callable[[str, int, int], None]


@dataclass
class CheckResults:
    """The results of all checks. about: the facts about the machine, by name. results: in the order
    of the checks.
    """

    about: dict[str, str] = field(default_factory=dict)
    results: list[CheckResult] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return any(result.status is CheckStatus.FAILED for result in self.results)


def supervise(names: Sequence[str], setting: Setting, progress: Progress) -> CheckResults:
    """Run the checks in a new directory below `setting.directory`; `setting.device` may be "auto".
    Blocks.

    Raises `ConfigError` if the device cannot be used or the directory is none, `StoreError` if it
    cannot be written to, and `StateError` if the worker ends, or is late, while no check runs.
    """
    findings = CheckResults()
    as_ctrl_c = ended_by_signals(lambda number: KeyboardInterrupt())
    with as_ctrl_c, _scratch(setting.directory) as directory:
        inside = replace(setting, directory=directory)
        while left := names[len(findings.results) :]:
            with _CheckProcess(left, inside) as worker:
                _follow(worker, names, findings, progress)
    return findings


def _follow(
    worker: _CheckProcess, names: Sequence[str], findings: CheckResults, progress: Progress
) -> None:
    """Collect the worker's messages until it ends; the check that was running then has failed."""
    begun = ""
    for message in worker.messages():
        if "refused" in message:
            raise ConfigError(message["refused"])
        if "about" in message:
            findings.about = message["about"]
        if "begin" in message:
            begun = message["begin"]
            progress(begun, len(findings.results) + 1, len(names))
        if "result" in message:
            findings.results.append(CheckResult.of_dict(message["result"]))
            begun = ""
    if begun:
        text = f"its process {worker.fate()}"
        findings.results.append(CheckResult(begun, CheckStatus.FAILED, worker.since_s, text))
    elif len(findings.results) < len(names):
        raise StateError(f"selftest: the process that runs the checks {worker.fate()}")


class _CheckProcess:
    """A worker process in its own process group. The end of the block kills the whole group."""

    def __init__(self, names: Sequence[str], setting: Setting) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._rest, self._is_late, self._begin_s = b"", False, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offload.tools.selftest.worker"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
            env=_environment(),
        )
        asked = {**asdict(setting), "names": names}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already; `fate` tells how
            self._process.stdin.write((json.dumps(asked, default=str) + "\n").encode())

    @property
    def since_s(self) -> float:
        """The seconds since the worker's last message."""
        return time.monotonic() - self._begin_s

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it ends, or until it has sent nothing for LIMIT_S;
        before the first check for START_LIMIT_S, since it imports torch.
        """
        has_begun, pipe = False, self._process.stdout
        assert pipe is not None
        while True:
            self._begin_s = time.monotonic()
            wait_s = LIMIT_S if has_begun else START_LIMIT_S
            ready, _, _ = select.select([pipe], [], [], wait_s)
            self._is_late = not ready
            data = pipe.read(1 << 16) if ready else b""
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                if line.startswith(b"{"):  # not what is printed while the worker starts
                    message = json.loads(line)
                    has_begun = has_begun or "begin" in message
                    yield message

    def fate(self) -> str:
        """Tell how the worker ended, or that it was late, with its last line of output."""
        late = f"had not ended after {self.since_s:.0f} s"
        text = late if self._is_late else f"ended with {self._end()}"
        lines = [line for line in last_lines(self._said, _LAST_BYTES) if line.strip()]
        return text + (f"; it said: {lines[-1]}" if lines else "")

    def _end(self) -> str:
        """Wait for the worker's end and describe it. The worker stays a zombie, so that no other
        process gets the ID of its process group.
        """
        end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        if end.si_code == os.CLD_EXITED:
            return f"exit code {end.si_status}"
        return signal.Signals(end.si_status).name

    def __enter__(self) -> _CheckProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._process, self._said:
            signal_group(self._process, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Return the worker's environment: deterministic matrix products on CUDA, and OpenMP threads
    that wait without spinning, since with spinning small steps take ten times as long on a busy
    machine. The user's own settings take precedence.
    """
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**ours, **os.environ}


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Provide a new directory below `parent` while the block runs, then remove it. Raises
    `ConfigError` or `StoreError` if it cannot be made.
    """
    name = printable(parent)
    if not parent.is_dir():
        raise ConfigError(f"--nvme: {name} is not a directory; make it, or give another")
    try:
        directory = Path(tempfile.mkdtemp(prefix="offload-selftest-", dir=parent)).resolve()
    except OSError as error:
        raise StoreError(
            f"--nvme: {name} cannot be written to: {error.strerror}; allow it, or give another",
            errno=error.errno,
            operation="mkdir",
            file=str(parent),
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
