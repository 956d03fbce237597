"""A thread that does acts one after the other, and ends before the interpreter does."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

Act: TypeAlias = Callable[[], Callable[[], None]]  # does it; what it returns tells of it
Acts: TypeAlias = "queue.SimpleQueue[Act | None]"

_EXIT_S = 2.0  # for how long the end of the process waits for threads that wait for others
_RUNNING: weakref.WeakKeyDictionary[threading.Thread, Acts] = weakref.WeakKeyDictionary()


class Worker:
    """Acts are done in the order of `put`, until `end`, until nobody has the worker, or until the
    process ends; then `at_end`, in the same thread.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._acts: Acts = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._acts, at_end), name=name, daemon=True)
        _RUNNING[thread] = self._acts
        thread.start()
        weakref.finalize(self, self._acts.put, None).atexit = False

    def put(self, act: Act) -> None:
        self._acts.put(act)

    def end(self) -> None:
        """When all that was put before is done; what is put later is not. Does not wait."""
        self._acts.put(None)


def _work(acts: Acts, at_end: Callable[[], None]) -> None:
    while True:
        act = acts.get()
        if act is None:
            return at_end()
        end = act()
        del act  # it holds tensors, whose memory may be wanted as soon as it is over
        end()
        del end


@atexit.register
def _end_all() -> None:
    """Connections go down here, not later: their own threads let go of tensors, and so does an act
    that has the last hold of them. To ask for the GIL when the interpreter has gone would abort the
    process.
    """
    running = [(thread, acts) for thread, acts in _RUNNING.items() if thread.is_alive()]
    for _, acts in running:
        acts.put(None)
    limit_s = time.monotonic() + _EXIT_S
    for thread, _ in running:
        thread.join(max(0.0, limit_s - time.monotonic()))
