"""The pool of host memory for blocks in flight and for optimizer state in memory.

The pool maps one arena at the start, exactly as large as the budget, aligned to 2 MiB, on huge
pages if the system has them, and registers it with a device if that copies to and from it. The
arena is cut into leases. A lease has one holder. Its extent returns to the pool when the lease is
released, its `with` block is left, or it is garbage collected; but never before the last tensor on
it is freed, so that no memory is reused while a tensor reads or writes it. A request beyond the
budget blocks or raises `CapacityError`; the arena never grows. Any thread. The pool knows bytes, no
tensor names and no files.

A forked child does not inherit the arena (MADV_DONTFORK): the kernel would otherwise copy pages
under transfers in flight. Using the pool there raises `StateError`.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.core.budget import HOST, Budget
from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.extents import best_extents
from offload.core.locks import Gate, uninterrupted
from offload.core.log import LOG
from offload.core.metrics import Metrics

ARENA_ALIGN = 2 << 20  # a huge page
PIECE_ALIGN = 4096  # leases start at a page: direct I/O needs it, and 64-byte alignment follows
_RECHECK_S = 0.05  # how long a waiting thread may miss an extent that came back under the lock

# Arenas that the device did not unregister: they stay mapped to the end of the process.
_KEPT: list[object] = []


class _Arena(mmap.mmap):
    """The mapping of a pool's arena. It is unmapped with the last reference to a part of it.

    It is unregistered with the accelerator just before, in `__del__`: the finalizer of a weak
    reference would run after the unmapping.
    """

    unregister: Callable[[], None] | None = None

    def __del__(self) -> None:
        unregister, self.unregister = self.unregister, None
        if unregister is None:
            return
        try:
            unregister()
        except Exception as error:  # no caller can catch it here
            LOG.warning("host memory: could not be unpinned, and stays mapped: %s", error)
            _KEPT.append(self)  # else CUDA would take new memory at this address for pinned


_ARENAS: weakref.WeakSet[_Arena] = weakref.WeakSet()


@atexit.register
def _leave_registered() -> None:
    """Skip the unregistering at exit: the end of the process unpins all memory, in less time, and
    torch may be unloaded by then.
    """
    for arena in list(_ARENAS):
        arena.unregister = None


_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MOST_TOUCHING = 8  # threads that fault pages in; more were no faster where that was measured
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process
_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class RegistrationError(RuntimeError):
    """A refusal of the device's runtime to register host memory, or to unregister it."""


# Registers the arena with a device and returns the function that unregisters it; None: the device
# needs no registration. Raises `RegistrationError` if the device refuses.
Register = Callable[[int, int, torch.device], Callable[[], None] | None]


def register_host_memory(
    address: int, nbytes: int, device: torch.device
) -> Callable[[], None] | None:
    """Pin the arena for a GPU, and return the function that unpins it; None for another device.

    The only call here for which torch has no device-independent form.
    """
    if device.type != "cuda":
        return None
    with torch.accelerator.device_index(device.index):  # else CUDA makes a context on GPU 0
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(result) == _ALREADY:  # by code that freed its memory here without unregistering it
            runtime.cudaHostUnregister(address)
            result = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        _check_registered(runtime, result, device)
    return partial(_unregister_host_memory, runtime, address, device)


def _unregister_host_memory(runtime: Any, address: int, device: torch.device) -> None:
    with torch.accelerator.device_index(device.index):
        _check_registered(runtime, runtime.cudaHostUnregister(address), device)


def _check_registered(runtime: Any, result: Any, device: torch.device) -> None:
    if int(result) == 0:
        return
    _clear_last_error(device)
    if int(result) == _ALREADY:
        raise StateError(
            f"host memory: {device} has some of it registered as pinned memory that was freed "
            "without telling CUDA, and would copy other bytes; restart the process"
        )
    raise RegistrationError(f"{runtime.cudaGetErrorString(result)} ({int(result)})")


def _clear_last_error(device: torch.device) -> None:
    """Clear CUDA's last error, which the next kernel launch, an innocent one, would raise.

    A launch reads and clears it; torch has no other call that does. If the second launch raises,
    too, the error was no refusal: the device is lost, and the error is raised.
    """
    for has_tried in (False, True):
        try:
            torch.full((1,), 1.0, dtype=torch.float32, device=device)
            return
        except RuntimeError:
            if has_tried:
                raise


def _fault_in(address: int, nbytes: int) -> None:
    """Fault in all pages now, with several threads: the registration would do it with one thread,
    which takes three times as long. Where madvise cannot do it, the registration does.
    """
    if not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise  # unlike mmap's own it lets other threads run
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    count = max(1, min(_MOST_TOUCHING, len(os.sched_getaffinity(0))))
    part = -(-nbytes // count // ARENA_ALIGN) * ARENA_ALIGN
    threads = [
        threading.Thread(
            target=advise, args=(address + begin, min(part, nbytes - begin), _MADV_POPULATE_WRITE)
        )
        for begin in range(0, nbytes, part)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class PoolStats:
    """The statistics of a pool at one moment."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int


class Pool:
    """A pool of host memory: an arena of `nbytes`, cut into leases. After `close()` the memory is
    freed as soon as the last lease has returned.

    device: the device that copies to and from the arena, which is registered with it; None, or the
    CPU: not registered. If the device refuses, copies block, and `metrics` records a fall-back.
    """

    def __init__(
        self,
        nbytes: int,
        register: Register = register_host_memory,
        budget: Budget = HOST,
        device: torch.device | None = None,
        metrics: Metrics | None = None,
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
        weakref.finalize(arena, share.release).atexit = False  # after the last lease is freed
        whole = (ctypes.c_char * len(arena)).from_buffer(arena)
        self._begin = -ctypes.addressof(whole) % ARENA_ALIGN
        self.address = ctypes.addressof(whole) + self._begin
        if device is not None and device.type != "cpu":
            arena.unregister = self._pin(register, device, metrics or Metrics())
        self._map: _Arena | None = arena  # None: closed
        self._extents = best_extents()(self.capacity_bytes, PIECE_ALIGN)
        self._lock = threading.Lock()
        self._changed = Gate(self._lock)
        # Extents that were returned. A finalizer may run at any moment, even in a thread that holds
        # the lock, so it only appends the extent here.
        self._returned: deque[int] = deque()
        self._queue: deque[object] = deque()  # one entry per waiting thread, served in order
        self._peak_bytes = 0

    def _pin(
        self, register: Register, device: torch.device, metrics: Metrics
    ) -> Callable[[], None] | None:
        size = format_size(self.capacity_bytes)
        LOG.info("host memory: pinning %s for %s", size, device)
        begin_s = time.monotonic()
        _fault_in(self.address, self.capacity_bytes)
        try:
            unregister = register(self.address, self.capacity_bytes, device)
        except RegistrationError as error:
            metrics.fall_back(
                "pinned host memory",
                f"{device} refused {size}: {error}; the CPU waits for each copy of it; give "
                "host_memory= less than may be pinned here (WSL2 and some containers allow "
                "little), or raise the limit",
            )
            return None
        if unregister is not None:
            LOG.info("host memory: pinned %s in %.1f s", size, time.monotonic() - begin_s)
        return unregister

    def lease(self, nbytes: int, timeout_s: float | None = 0.0, what: str = "a block") -> Lease:
        """Lease `nbytes` of the arena, as `try_lease` does. Raises `CapacityError` with the numbers
        if that gets none. what: the purpose, for that message.
        """
        lease = self.try_lease(nbytes, timeout_s)
        if lease is not None:
            return lease
        why = "it is larger than the whole pool"
        if nbytes <= self.capacity_bytes:
            why = f"none was freed within {timeout_s:g} s"
        with self._lock:
            free, largest = self.capacity_bytes - self._extents.used, self._extents.largest_free
        raise CapacityError(
            f"host pool: {what} needs {format_size(nbytes)} ({nbytes} bytes), {format_size(free)} "
            f"of {format_size(self.capacity_bytes)} are free, the largest piece is "
            f"{format_size(largest)}; {why}; raise host_memory, or use less"
        )

    @uninterrupted
    def try_lease(self, nbytes: int, timeout_s: float | None = 0.0) -> Lease | None:
        """Lease `nbytes` of the arena. Blocks up to `timeout_s` (None: without limit) until other
        leases return enough memory; requests are served in order. Returns None if no extent becomes
        free in time, and at once if the request is larger than the pool.
        """
        self._check_usable()
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ConfigError(f"nbytes: expected a whole number from 0 on, got {nbytes!r}")
        size = max(nbytes, 1)  # an empty lease is a lease, too
        if size > self.capacity_bytes:
            return None
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
                return None
            self._peak_bytes = max(self._peak_bytes, self._extents.used)
        try:
            return Lease(self, begin, nbytes)
        except BaseException:
            self._put_back(begin)
            raise

    def _wait_for(self, size: int, place: object, deadline_s: float | None) -> int | None:
        while True:
            while self._returned:
                self._extents.give_back(self._returned.popleft())
            begin = self._extents.find(size) if self._queue[0] is place else None
            if begin is not None:
                self._extents.take_at(begin, size)
                return begin
            left_s = _RECHECK_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self._changed.wait(min(left_s, _RECHECK_S))
            self._check_usable()

    def _put_back(self, begin: int) -> None:
        """Return an extent to the pool. Finalizers call it: it must not block and must not fail."""
        self._returned.append(begin)
        self._changed.notify_all()

    def buffer(self) -> memoryview:
        """Return a view of the whole arena, to register it elsewhere; the view keeps it mapped."""
        self._check_usable()
        return memoryview(self._memory(0, self.capacity_bytes)).cast("B")

    def stats(self) -> PoolStats:
        self._check_usable(may_be_closed=True)
        with self._lock:
            while self._returned:
                self._extents.give_back(self._returned.popleft())
            return PoolStats(self.capacity_bytes, self._extents.used, self._peak_bytes)

    def close(self) -> None:
        """Refuse further leases. Leases that are still held stay valid until they are released; the
        arena is unmapped with the last. Idempotent; in a forked child it does nothing.
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

    def _check_usable(self, may_be_closed: bool = False) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "host pool: made by the parent process; a forked child must not use it"
            )
        if self._map is None and not may_be_closed:
            raise StateError("host pool: closed")

    def _memory(self, begin: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        arena = self._map
        if arena is None:
            raise StateError("host pool: closed")
        return (ctypes.c_char * nbytes).from_buffer(arena, self._begin + begin)


class Lease:
    """A lease of one extent of a pool, with one holder. `release()` ends it, and so does the end of
    its `with` block.
    """

    def __init__(self, pool: Pool, begin: int, nbytes: int) -> None:
        self._pool = pool
        self._begin = begin
        self.nbytes = nbytes
        # All that can reach the memory, tensors included, refers to this object. When it is
        # collected, its extent returns to the pool.
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
        """Make a tensor on the lease's memory. It keeps the memory alive, also after `release`."""
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

    def release(self, *exception: object) -> None:
        """End the lease. Its extent returns to the pool as soon as no tensor or view is left on it.
        Idempotent.
        """
        self._held = None

    __exit__ = release

    def _memory(self) -> ctypes.Array[ctypes.c_char]:
        if self._held is None:
            raise StateError("lease: already released")
        if os.getpid() != self._pool._pid:
            raise StateError("lease: made by the parent process; a forked child must not use it")
        return self._held

    def __enter__(self) -> Lease:
        return self


def _map_arena(nbytes: int) -> _Arena:
    """Map private memory for `nbytes`, plus one huge page for alignment, which is never touched."""
    arena = _Arena(-1, nbytes + ARENA_ALIGN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            arena.madvise(getattr(mmap, advice))
    _ARENAS.add(arena)
    return arena


def _keep_inherited_arenas() -> None:
    """Keep a forked child from unmapping the parent's arenas. They are not mapped in the child, and
    its own memory may be at their addresses.
    """
    for arena in list(_ARENAS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(arena))


os.register_at_fork(after_in_child=_keep_inherited_arenas)
