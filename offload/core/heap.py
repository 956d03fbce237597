"""The C library's heap: how much freed memory it keeps, and when it gives that back to the kernel.

Kept is fast: an optimizer's state, made in the first step, lies at the top of the heap, above
gradients and activations, and so keeps glibc from giving their memory back whenever they are freed.
When the state moves away, every step would fault their pages in again. So glibc is told to keep
what is freed.

But what is kept is not always used again. torch aligns its tensors to 64 bytes, for which glibc
looks for a chunk that is 96 bytes larger than the tensor: that of a freed tensor of the same size
is too small unless its neighbours are free, too. Gradients that come and go one after the other, as
those do that have a place on disk, then take new memory each, up to the sum of them all. So RSS is
looked at while gradients arrive and units run. Where it has grown by more than `SLACK_BYTES` beyond
what was ever needed, free pages go back to the kernel: what is left is what is in use.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from offload.core.gauges import private_bytes, resident_bytes, resident_peak_bytes
from offload.core.metrics import Metrics

SLACK_BYTES: Final = 96 << 20  # that may be free and resident beyond the most that was needed
_PASSING_SLACK_BYTES = 32 << 20  # the same, beyond what comes and goes between two looks
_LOOK_EVERY_BYTES = 16 << 20  # of gradients
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt
_NEVER = -1
_MOST_MMAP_BYTES = 32 << 20  # where glibc itself ends up; a limit of our own turns its own off
_NO_TRIM = (
    "this C library has no malloc_trim: memory of freed gradients may stay with the process, "
    "beyond host_memory"
)


class Heap:
    """Of this process, for all prepared models and wrapped optimizers. No lock: threads that look
    at once do the same twice.
    """

    def __init__(
        self,
        private: Callable[[], int | None] = private_bytes,
        trim: Callable[[], bool] | None = None,
    ) -> None:
        self._private = private
        self._trim = trim or give_back_free_pages
        self._users = 0
        self._level_bytes = 0  # RSS that needs no trimming
        self._last_bytes = 0  # RSS when it was last looked at
        self._passing_bytes = 0  # most that one look saw come and go since the one before it
        self._arrived_bytes = 0
        self.base_bytes: int | None = None  # resident when nothing of ours was there
        self._peak_before_bytes = 0  # of RSS, at that time
        self.trims = 0

    def serve(self, user: object, metrics: Metrics) -> None:
        """Keep what is freed, within bounds, as long as `user` lives, which has not begun to use
        its memory yet.
        """
        if not keep_freed_memory() and _glibc() is None:
            metrics.fall_back("freed memory", _NO_TRIM)
        if self._users == 0:
            self.base_bytes = resident_bytes()
            self._peak_before_bytes = resident_peak_bytes() or 0
        self._users += 1
        weakref.finalize(user, self._leave).atexit = False

    def settle(self) -> None:
        """What was to be moved into a user's memory has been moved, and freed where it was."""
        if self._users and self._trim():
            known = [n for n in (self.base_bytes, resident_bytes()) if n is not None]
            self.base_bytes = min(known, default=None)
        self.look()

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._level_bytes = self._last_bytes = self._passing_bytes = 0
            self.base_bytes = None
            give_freed_memory_back()

    def arrived(self, nbytes: int) -> None:
        """So many bytes of gradients have been made."""
        self._arrived_bytes += nbytes
        if self._arrived_bytes >= _LOOK_EVERY_BYTES:
            self.look()

    def look(self) -> None:
        """Have free pages go where RSS has grown without need. Costs some microseconds where it has
        not. Any thread.
        """
        self._arrived_bytes = 0
        now = self._private() if self._users else None
        if now is not None and now > self._level_bytes and self._trim():
            self.trims += 1
            now = self._note_trim(now, self._private() or now)
        self._last_bytes = now or 0

    def _note_trim(self, before: int, left: int) -> int:
        """What is left is in use. What came since the last look and has gone was needed in between,
        and will be again: to give that back each time would cost more than it is worth.
        """
        passed = min(before - self._last_bytes, before - left)
        self._passing_bytes = max(self._passing_bytes, passed)
        allowed = left + max(SLACK_BYTES, self._passing_bytes + _PASSING_SLACK_BYTES)
        self._level_bytes = max(self._level_bytes, allowed)
        return left

    def peak_bytes(self) -> int | None:
        """Most RSS since there is a user; None: there is none, or it is not known because there was
        more before.
        """
        peak = resident_peak_bytes() if self._users else None
        return peak if peak is not None and peak > self._peak_before_bytes else None


def keep_freed_memory() -> bool:
    """Whether it was done. Whoever has set glibc's own variables knows better."""
    mallopt = None if _is_set_by_user() else _mallopt()
    if mallopt is None:
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(done)


def give_freed_memory_back() -> None:
    """Now, and from now on as glibc does by itself once a tensor of 32 MiB was freed: what it did
    before cannot be asked.
    """
    mallopt = None if _is_set_by_user() else _mallopt()
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_MMAP_BYTES)
    give_back_free_pages()


def give_back_free_pages() -> bool:
    """Of all the heap, wherever they are; whether there is a way to do that."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
    return library is not None


def _is_set_by_user() -> bool:
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    return chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def _mallopt() -> Any:
    library = _glibc()
    return None if library is None else library.mallopt


@cache
def _glibc() -> Any:
    """None: there is another C library."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version()
        _ = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return None
    return library


HEAP: Final = Heap()
