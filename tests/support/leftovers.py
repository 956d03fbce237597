"""Checks that a test has released its memory, threads and files when it has ended."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from offload.core.budget import Budget

WITHIN_S = 60.0


def await_nothing_held(budget: Budget) -> None:
    """Wait until no host memory of the budget is in use, for a minute at most.

    A thread of autograd frees a graph a moment after `backward()` has returned, which on a busy
    machine is any time later; the graph holds memory of the engine.
    """
    end_s = time.monotonic() + WITHIN_S
    gc.collect()
    while budget.used_bytes:
        if time.monotonic() > end_s:
            raise AssertionError(
                f"{budget.used_bytes:,} bytes of the budget are in use {WITHIN_S:.0f} s after the "
                f"test, by {budget.holders()}; expected none: something still holds a lease, or a "
                "view of one"
            )
        time.sleep(0.01)
        gc.collect()


@dataclass(frozen=True)
class Handles:
    """The threads and open files of this process, files with what they lead to."""

    threads: frozenset[str]
    files: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Handles:
        gc.collect()  # frames of exceptions that were raised
        files = set()
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the descriptor of the listing itself
                files.add((number, os.readlink(f"/proc/self/fd/{number}")))
        threads = frozenset(thread.name for thread in threading.enumerate())
        return cls(threads, frozenset(files))

    def await_no_others(self) -> None:
        """Wait until there are no threads or files other than these, for a minute at most."""
        end_s = time.monotonic() + WITHIN_S
        while True:
            now = Handles.now()
            others = sorted(now.threads - self.threads), sorted(now.files - self.files)
            if not any(others):
                return
            if time.monotonic() > end_s:
                raise AssertionError(
                    f"threads {others[0]} and open files {others[1]} are left {WITHIN_S:.0f} s "
                    "later; expected none"
                )
            time.sleep(0.01)
