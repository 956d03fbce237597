"""Records which lines of the package run under which test, in every Python process of a run.

A `.pth` file imports this where Python starts, so that it is the same for pytest, for the programs
that tests start, and for the forks of either. A process records under the test that runs when it
begins. It reads that from a file that pytest writes, and not from its environment, since that of a
fork server is the environment of the test that started the server. Nothing is recorded without
`CONTEXTS_DATA` (where the data goes, each process to a file of its own beside it) and
`CONTEXTS_SOURCES` (patterns of files).

A process that SIGKILL ends has recorded nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NoReturn

DATA, SOURCES, NOW = "CONTEXTS_DATA", "CONTEXTS_SOURCES", "CONTEXTS_NOW"

# The real functions, from before a test patches them.
_open, _close, _pread, _pwrite, _exit = os.open, os.close, os.pread, os.pwrite, os._exit
_LENGTH = 4096  # of the file: a write of it is seen as a whole
_present: Any = None  # the coverage object that records in this process


def begin() -> None:
    """Record from here on, under the test that runs now."""
    global _present
    import coverage

    _present = coverage.Coverage(
        data_file=os.environ[DATA],
        data_suffix=True,
        config_file=False,
        include=os.environ[SOURCES].split(os.pathsep),
        context=_test() or None,
        messages=False,
    )
    _present.start()


def _test() -> str:
    """Return the context that pytest has written last."""
    path = os.environ.get(NOW)
    if path is None:
        return ""
    file = _open(path, os.O_RDONLY)
    try:
        return _pread(file, _LENGTH, 0).decode().strip()
    finally:
        _close(file)


def tell(path: str) -> None:
    """Make `path` the file in which processes started from now on find the running test.

    The process of pytest calls it, once.
    """
    _write(path, "")
    os.environ[NOW] = path


def switch(context: str) -> None:
    """Record under another context from now on, here and in processes started from now on.

    The process of pytest calls it.
    """
    _write(os.environ[NOW], context)
    _present.switch_context(context)


def _write(path: str, context: str) -> None:
    file = _open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        _pwrite(file, context.encode()[:_LENGTH].ljust(_LENGTH), 0)
    finally:
        _close(file)


def run_in_this_thread() -> None:
    """Have autograd call hooks in the thread that calls `backward`: threads of its own are not
    traced. (Only for devices; on the CPU it does so anyway.)
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.autograd.set_multithreading_enabled(False)


def _begin_again() -> None:
    """Begin to record in a forked process; what its parent has recorded stays the parent's."""
    _present.stop()
    begin()
    run_in_this_thread()


def _end() -> None:
    _present.stop()
    _present.save()


def _exit_at_once(status: int) -> NoReturn:
    try:
        _end()
    finally:
        _exit(status)


if DATA in os.environ and _present is None:
    begin()
    atexit.register(_end)
    os.register_at_fork(after_in_child=_begin_again)
    os._exit = _exit_at_once
