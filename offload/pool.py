"""Host memory for blocks in flight and for state that lives in memory.

One arena is mapped at the start, exactly as large as the budget, aligned to 2 MiB, on huge pages
where the system has them, and registered with the accelerator where there is one. It is cut into
leases. A lease has one holder and returns its piece by itself: when it is released, when its `with`
block is left, or when it is forgotten; but never before the last tensor that was made on it is
gone, so that no memory is reused under somebody's feet. A request beyond the budget waits or raises
`CapacityError`; the arena never grows. Any thread. Knows bytes, not tensor names or files.

The arena is not inherited by a forked child (MADV_DONTFORK): the kernel would otherwise copy pages
under running transfers. Using a pool there is a `StateError`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.budget import HOST, Budget
from offload.config import format_size
from offload.errors import CapacityError, ConfigError, StateError
from offload.extents import Extents

ARENA_ALIGN = 2 << 20  # a huge page
PIECE_ALIGN = 4096  # every lease starts at a page: direct I/O wants it, and 64-byte lines follow
_RECHECK_S = (
    0.05  # how long a waiting thread may overlook a piece that came back while the lock was held
)

# Pieces that a stuck operation may still write to. They hold their arena's map, which must outlive
# the pool then.
_QUARANTINE: list[ctypes.Array[ctypes.c_char]] = []


class _Arena(mmap.mmap):
    """The map of a pool. It goes with the last who holds a piece of it, and the accelerator is told
    just before: a finalizer of a weak reference would come after the memory is gone.
    """

    unregister: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


_ARENAS: weakref.WeakSet[_Arena] = weakref.WeakSet()

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process

# Makes the arena known to the accelerator and returns what undoes it; None when there is nobody to
# tell.
Register = Callable[[int, int], Callable[[], None] | None]


def register_host_memory(address: int, nbytes: int) -> Callable[[], None] | None:
    """Pin the arena for the accelerator that torch has. The one call that has no general form in
    torch.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda":
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    return lambda: torch.cuda.check_error(runtime.cudaHostUnregister(address))


@dataclass(frozen=True)
class PoolStats:
    """Bytes of a pool at one moment."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    largest_free_bytes: int
    quarantined_bytes: int
    leases: int


class Pool:
    """An arena of `nbytes`, cut into leases. `close()` gives the memory back once the last lease
    has returned.
    """

    def __init__(
        self,
        nbytes: int,
        register: Register = register_host_memory,
        budget: Budget = HOST,
    ) -> None:
        if nbytes < PIECE_ALIGN:
            raise ConfigError(f"nbytes: expected at least {PIECE_ALIGN} bytes, got {nbytes}")
        self.capacity_bytes = nbytes - nbytes % PIECE_ALIGN
        self._pid = os.getpid()
        share = budget.take(self.capacity_bytes, "host pool")
        try:
            arena = _map_arena(self.capacity_bytes)
        except BaseException:
            share.release()
            raise
        weakref.finalize(arena, share.release).atexit = False  # when the last lease is gone
        whole = (ctypes.c_char * len(arena)).from_buffer(arena)
        self._begin = -ctypes.addressof(whole) % ARENA_ALIGN
        self.address = ctypes.addressof(whole) + self._begin
        arena.unregister = register(self.address, self.capacity_bytes)
        self._map: _Arena | None = arena  # None: closed
        self._extents = Extents(self.capacity_bytes, PIECE_ALIGN)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Pieces that have come back. A finalizer may run at any moment, even in a thread that holds
        # the lock, so it only leaves the piece here.
        self._returned: deque[int] = deque()
        self._queue: deque[object] = deque()  # threads that wait, first come first served
        self._peak_bytes = 0
        self._quarantined_bytes = 0

    def lease(self, nbytes: int, timeout_s: float | None = 0.0, what: str = "a block") -> Lease:
        """The right to use `nbytes`. Waits up to `timeout_s` (None: as long as it takes) for others
        to return theirs.

        Raises `CapacityError` with the numbers when it is not to be had, at once when it never will
        be.
        """
        self._check_usable()
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ConfigError(f"nbytes: expected a whole number from 0 on, got {nbytes!r}")
        size = max(nbytes, 1)  # an empty lease is a lease, too
        if self._extents.round_up(size) > self.capacity_bytes:
            raise CapacityError(self._refusal(nbytes, what, "it is larger than the whole pool"))
        place = object()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._queue.append(place)
            try:
                begin = self._wait_for(size, place, deadline_s)
            finally:
                self._queue.remove(place)
                self._changed.notify_all()
            if begin is None:
                raise CapacityError(
                    self._refusal(nbytes, what, f"none came free in {timeout_s:g} s")
                )
            self._peak_bytes = max(self._peak_bytes, self._extents.used)
        try:
            return Lease(self, begin, nbytes)
        except BaseException:
            self._put_back(begin)
            raise

    def _wait_for(self, size: int, place: object, deadline_s: float | None) -> int | None:
        while True:
            self._check_usable()
            self._take_in_returned()
            if self._queue[0] is place and (begin := self._extents.take(size)) is not None:
                return begin
            left_s = _RECHECK_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self._changed.wait(min(left_s, _RECHECK_S))

    def _refusal(self, nbytes: int, what: str, why: str) -> str:
        free = self.capacity_bytes - self._extents.used
        return (
            f"host pool: {what} needs {format_size(nbytes)} ({nbytes} bytes), {format_size(free)} "
            f"of {format_size(self.capacity_bytes)} are free, the largest piece is "
            f"{format_size(self._extents.largest_free)}; {why}; raise host_memory, or use less"
        )

    def _take_in_returned(self) -> None:
        while self._returned:
            self._extents.give_back(self._returned.popleft())

    def _put_back(self, begin: int) -> None:
        """Called by finalizers: must not block and must not fail."""
        self._returned.append(begin)
        if self._lock.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._lock.release()

    def buffer(self) -> memoryview:
        """The whole arena, to register it with others; whoever has it keeps it."""
        self._check_usable()
        return memoryview(self._memory(0, self.capacity_bytes)).cast("B")

    def stats(self) -> PoolStats:
        self._check_process()
        with self._lock:
            self._take_in_returned()
            return PoolStats(
                self.capacity_bytes,
                self._extents.used,
                self._peak_bytes,
                self._extents.largest_free,
                self._quarantined_bytes,
                self._extents.pieces,
            )

    def close(self) -> None:
        """Refuse further leases. Pieces that are still held stay valid until they are returned; the
        arena goes with the last. Idempotent; in a forked child it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._map = None
            self._changed.notify_all()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "host pool: made by the parent process; a forked child must not use it"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._map is None:
            raise StateError("host pool: closed")

    def _memory(self, begin: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        arena = self._map
        if arena is None:
            raise StateError("host pool: closed")
        return (ctypes.c_char * nbytes).from_buffer(arena, self._begin + begin)


class Lease:
    """The right to use one piece of a pool. One holder; `release()` ends it, leaving a `with` block
    too.
    """

    def __init__(self, pool: Pool, begin: int, nbytes: int) -> None:
        self._pool = pool
        self._begin = begin
        self.nbytes = nbytes
        # Whoever can reach the memory holds this object, tensors included. When it goes, the piece
        # goes back.
        memory = pool._memory(begin, max(nbytes, 1))
        self._return = weakref.finalize(memory, pool._put_back, begin)
        self._return.atexit = False
        self._held: ctypes.Array[ctypes.c_char] | None = memory

    @property
    def address(self) -> int:
        return ctypes.addressof(self._memory())

    def tensor(
        self, dtype: torch.dtype = torch.uint8, numel: int | None = None, offset_bytes: int = 0
    ) -> Tensor:
        """A tensor on the lease's memory; it keeps the memory, also after the lease is released."""
        memory = self._memory()
        if numel is None:
            numel = (self.nbytes - offset_bytes) // dtype.itemsize
        end = offset_bytes + numel * dtype.itemsize
        if not (0 <= offset_bytes <= end <= self.nbytes):
            raise ConfigError(
                f"offset_bytes, numel: [{offset_bytes}, {end}) is not within {self.nbytes} bytes"
            )
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset_bytes)

    def buffer(self) -> memoryview:
        """The memory as bytes; it keeps the memory as a tensor does."""
        return memoryview(self._memory())[: self.nbytes].cast("B")

    def release(self) -> None:
        """End the lease. The piece returns to the pool as soon as no tensor or view is left on it.
        Idempotent.
        """
        self._held = None

    def quarantine(self) -> None:
        """Never give this piece back: an operation on it is stuck and may still write to it."""
        memory = self._memory()
        if self._return.detach():
            with self._pool._lock:
                self._pool._quarantined_bytes += self._pool._extents.size_at(self._begin)
        _QUARANTINE.append(memory)
        self._held = None

    def _memory(self) -> ctypes.Array[ctypes.c_char]:
        if self._held is None:
            raise StateError("lease: already released")
        if os.getpid() != self._pool._pid:
            raise StateError("lease: made by the parent process; a forked child must not use it")
        return self._held

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _map_arena(nbytes: int) -> _Arena:
    """Private memory for `nbytes` and the way to the next huge page, which is never touched."""
    arena = _Arena(-1, nbytes + ARENA_ALIGN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            arena.madvise(getattr(mmap, advice))
    _ARENAS.add(arena)
    return arena


def _keep_inherited_arenas() -> None:
    """In a forked child: never unmap the parent's arenas. They are not mapped here, and other
    memory of the child's may lie in their place.
    """
    for arena in list(_ARENAS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(arena))


os.register_at_fork(after_in_child=_keep_inherited_arenas)
