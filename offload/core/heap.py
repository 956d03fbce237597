"""The C library's heap: how much freed memory it keeps, and when it returns that to the kernel.

Keeping freed memory is fast. In plain training the optimizer state, allocated in the first step,
lies at the top of the heap, above gradients and activations, and so keeps glibc from returning
their memory to the kernel whenever they are freed. With the state evicted, every step would fault
their pages in again. So the engine tells glibc to keep freed memory.

But glibc does not always reuse what it keeps. torch aligns its tensors to 64 bytes, for which glibc
looks for a heap chunk that is 96 bytes larger than the tensor: that of a freed tensor of the same
size is too small unless its neighbours are free, too. Gradients that are made and freed one after
the other, as spilled gradients are, then take new memory each, up to the sum of them all. So the
engine looks at RSS while gradients arrive and units run. Where RSS has grown by more than
`SLACK_BYTES` beyond the most that was ever needed, it trims the heap: free pages return to the
kernel, and the RSS that is left is in use. The gauges of memory are here, too.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

from offload.core.metrics import Metrics

SLACK_BYTES: Final = 160 << 20  # may be free and resident beyond the most that was needed
_PASSING_SLACK_BYTES = 32 << 20  # the same, beyond the memory made and freed between two looks
_LOOK_EVERY_BYTES = 16 << 20  # of gradients
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt
_NEVER = -1
_MOST_MMAP_BYTES = 32 << 20  # where glibc's own threshold ends up; setting it ends its adjustment
_NO_TRIM = (
    "this C library has no malloc_trim: memory of freed gradients may stay with the process, "
    "beyond host_memory"
)


def used_by(holder: Any) -> Callable[[], int | None]:
    """Return a function that asks a pool or a store for its used bytes.

    The function has a weak reference to `holder`, and returns None once `holder` is collected.
    """
    there = weakref.ref(holder)

    def ask() -> int | None:
        found = there()
        return None if found is None else int(found.stats().used_bytes)

    return ask


def resident_bytes(is_shared_too: bool = True) -> int | None:
    """Return the RSS of this process; None where the system does not report it. is_shared_too: with
    file-backed pages and shared memory.
    """
    # Unbuffered: it is asked dozens of times a step, and a buffer costs half of the time.
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, _ = file.read(128).split(maxsplit=3)
        return (int(resident) - (0 if is_shared_too else int(shared))) * _PAGE_BYTES
    return None


def resident_peak_bytes() -> int | None:
    """Return the peak of `resident_bytes` in the life of this process (VmHWM); None if unknown."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    return None


class Heap:
    """The heap of this process, for its users: all prepared models and wrapped optimizers.

    No lock: threads that look at the same time do the same work twice.
    """

    def __init__(
        self,
        private: Callable[[], int | None] | None = None,
        trim: Callable[[], bool] | None = None,
    ) -> None:
        self._private = private or partial(resident_bytes, is_shared_too=False)
        self._trim = trim or give_back_free_pages
        self._users = 0
        self._level_bytes = 0  # RSS that needs no trimming
        self._last_bytes = 0  # RSS at the last look
        self._passing_bytes = 0  # most that was made and freed again between two looks
        self._arrived_bytes = 0
        self.base_bytes: int | None = None  # resident before the engine held any memory
        self._peak_before_bytes = 0  # peak of RSS at that time
        self.trims = 0

    def serve(self, user: object, metrics: Metrics) -> None:
        """Make glibc keep freed memory, within bounds, for the lifetime of `user`. To be called
        before `user` allocates its memory.
        """
        if not keep_freed_memory() and _glibc() is None:
            metrics.fall_back("freed memory", _NO_TRIM)
        if self._users == 0:
            self.base_bytes = resident_bytes()
            self._peak_before_bytes = resident_peak_bytes() or 0
        self._users += 1
        weakref.finalize(user, self._leave).atexit = False

    def trim_after_start(self) -> None:
        """Trim the heap, once values have been moved into a user's memory and their old memory was
        freed; lower `base_bytes` if RSS is below it now.
        """
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
        """Count `nbytes` of new gradients; look at RSS every 16 MiB of them."""
        self._arrived_bytes += nbytes
        if self._arrived_bytes >= _LOOK_EVERY_BYTES:
            self.look()

    def look(self) -> None:
        """Trim the heap if RSS has grown beyond the allowed level; otherwise the look costs some
        microseconds. Any thread.
        """
        self._arrived_bytes = 0
        now = self._private() if self._users else None
        if now is not None and now > self._level_bytes and self._trim():
            self.trims += 1
            now = self._note_trim(now, self._private() or now)
        self._last_bytes = now or 0

    def _note_trim(self, before: int, left: int) -> int:
        """Raise the allowed level after a trim, and return `left`, the bytes still in use.

        Memory that was made since the last look and has been freed again was needed in between, and
        will be again: to return it to the kernel each time would cost more than it is worth.
        """
        passed = min(before - self._last_bytes, before - left)
        self._passing_bytes = max(self._passing_bytes, passed)
        allowed = left + max(SLACK_BYTES, self._passing_bytes + _PASSING_SLACK_BYTES)
        self._level_bytes = max(self._level_bytes, allowed)
        return left

    def peak_bytes(self) -> int | None:
        """Return the peak of RSS since the first user; None: there is no user, or the peak is
        unknown because RSS was higher before.
        """
        peak = resident_peak_bytes() if self._users else None
        return peak if peak is not None and peak > self._peak_before_bytes else None


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return whether it does. Changes nothing if the user has set
    glibc's own environment variables.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(done)


def give_freed_memory_back() -> None:
    """Return freed memory to the kernel now, and from now on as glibc does by itself once a tensor
    of 32 MiB was freed: the setting from before cannot be read.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_MMAP_BYTES)
    give_back_free_pages()


def give_back_free_pages() -> bool:
    """Return the free pages of the whole heap to the kernel; False: the C library cannot."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
    return library is not None


def _mallopt() -> Any:
    """Return glibc's mallopt; None without glibc, or if the user has set its variables."""
    library = _glibc()
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if library is None or chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return library.mallopt


@cache
def _glibc() -> Any:
    """Load glibc; None if this process has another C library."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version()
        _ = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return None
    return library


HEAP: Final = Heap()
