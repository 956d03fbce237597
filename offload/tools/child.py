"""What commands need that run other processes: these end with the command, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO


@contextmanager
def ended_by_signals(error: Callable[[int], BaseException]) -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `error` of their number while the block runs, so that it is
    cleaned up as after Ctrl-C. A signal that is ignored stays so. Does nothing in threads other
    than the main one, where alone Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise error(number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    heard = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all processes of the group that `process` leads."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: the latter for an ended group
        os.killpg(process.pid, number)


def last_lines(file: IO[bytes], nbytes: int) -> list[str]:
    """Return the lines in the last bytes of a file."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - nbytes))
    return file.read().decode(errors="replace").splitlines()
