"""Mutual exclusion for one wrapped optimizer: one process, one thread, one act at a time.

A step moves chunks through a fixed set of buffers and changes state as it goes. Another step, save
or load meanwhile would read or leave a mixture. Such a call is refused, not kept waiting: the state
that it asked for would have changed by the time it could run. This holds for other threads, and for
a signal handler that runs in the middle of an act of its own thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from offload.core.errors import StateError
from offload.core.locks import attempt


class ExclusiveAccess:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._holder = ""  # what the thread that holds the lock does, for other threads' messages
        self._act: str | None = None  # the running act; no other may begin in its middle

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "optimizer: wrapped by the parent process; a forked child must not use it"
            )

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Keep other threads out while the block runs; raise `StateError` if one is inside. The
        same thread may enter again, as hooks do. Inside the block Ctrl-C takes effect only where
        the thread waits, and at the end.
        """
        self.check_process()
        with attempt(self._lock) as is_ours:
            if not is_ours:
                raise StateError(
                    f"optimizer: {what} while another thread is in {self._holder}; let one thread "
                    "use a wrapped optimizer at a time, or put a lock around its calls"
                )
            before, self._holder = self._holder, what
            try:
                yield
            finally:
                self._holder = before

    @contextmanager
    def act(self, what: str) -> Iterator[None]:
        """Keep out every other act while the block runs, also those of the same thread's signal
        handlers and hooks.
        """
        with self.hold(what):
            if self._act is not None:
                raise StateError(
                    f"optimizer: {what} in the middle of {self._act}; a signal handler or a hook "
                    "has to wait until that has returned (set a flag, and look at it in the loop)"
                )
            self._act = what
            try:
                yield
            finally:
                self._act = None
