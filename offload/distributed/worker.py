"""A thread that runs acts one after the other, and ends before the interpreter does."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

Act: TypeAlias = Callable[[], Callable[[], None]]  # runs; its result, called next, reports the end
Acts: TypeAlias = "queue.SimpleQueue[Act | None]"

_EXIT_S = 2.0  # how long the exit of the process waits for workers that wait for other ranks
_RUNNING: weakref.WeakKeyDictionary[threading.Thread, Acts] = weakref.WeakKeyDictionary()


class Worker:
    """A daemon thread that runs acts in the order of `put`, until `end`, until the worker is
    garbage collected, or until the process exits; then it calls `at_end`.
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
        """End the thread once all acts put so far have run; drop later ones. Does not wait."""
        self._acts.put(None)


def _work(acts: Acts, at_end: Callable[[], None]) -> None:
    while True:
        act = acts.get()
        if act is None:
            return at_end()
        end = act()
        del act  # it holds tensors; the caller may want their memory as soon as the act has ended
        end()
        del end


@atexit.register
def _end_all() -> None:
    """End all workers at exit, and with them their connections, while the interpreter still exists.
    The connections' own threads release tensors, and so does an act that holds the last reference
    to one; a request for the GIL after the interpreter has ended would abort the process.
    """
    running = [(thread, acts) for thread, acts in _RUNNING.items() if thread.is_alive()]
    for _, acts in running:
        acts.put(None)
    limit_s = time.monotonic() + _EXIT_S
    for thread, _ in running:
        thread.join(max(0.0, limit_s - time.monotonic()))
