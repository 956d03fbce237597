"""Pools without bytes, stores without files and units without modules: the engine's classes work
with these in a simulation. Tensors are on the meta device, which has none of their bytes.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.core.extents import Extents, best_extents
from offload.core.metrics import Metrics
from offload.core.pool import PIECE_ALIGN, PoolStats
from offload.planning.unit import Unit
from offload.storage.engine import KnownSums, Priority
from offload.tools.forecast.simulation.clock import Clock, DriveRequest


@dataclass(frozen=True)
class FactUnit(Unit):
    """A unit of which only the size is known."""

    size: int = 0

    @property
    def nbytes(self) -> int:
        return self.size


class VirtualTicket:
    """The ticket of a store's transfer, in virtual time. cause: what waiting for it counts as;
    None: what it counts as around the wait.
    """

    def __init__(self, clock: Clock, request: DriveRequest, cause: str | None) -> None:
        self._clock = clock
        self._request = request
        self._cause = cause

    @property
    def done(self) -> bool:
        return self._clock.has_ended(self._request)

    def wait(self) -> None:
        with nullcontext() if self._cause is None else self._clock.cause(self._cause):
            self._clock.wait_for(self._request)


class VirtualStore:
    """A store without files, whose transfers take as long as the clock's drives need."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics

    def read(
        self, name: str, target: Tensor, priority: Priority = Priority.WAITED_FOR
    ) -> VirtualTicket:
        return self.start(name, target.nbytes, False, priority)

    def write(
        self,
        name: str,
        source: Tensor,
        priority: Priority = Priority.WRITE_BACK,
        sums: KnownSums | None = None,
    ) -> VirtualTicket:
        return self.start(name, source.nbytes, True, priority)

    def start(
        self,
        name: str,
        nbytes: int,
        is_write: bool,
        priority: Priority,
        cause: str | None = None,
    ) -> VirtualTicket:
        """Start a transfer of so many bytes. cause: as the ticket's."""
        assert self._clock.drives is not None, "there is a store only where there are drives"
        self._metrics.count("disk_written_bytes" if is_write else "disk_read_bytes", nbytes)
        request = DriveRequest(name, nbytes, is_write, priority, self._clock.now_s)
        return VirtualTicket(self._clock, self._clock.drives.submit(request), cause)


class VirtualWeightBlock:
    """A block that is read from the user's weight files."""

    def __init__(self, store: VirtualStore, name: str) -> None:
        self._store = store
        self._name = name

    def read(self, memory: Tensor, priority: Priority) -> VirtualTicket:
        return self._store.read(self._name, memory, priority)


class VirtualPool:
    """A pool without bytes, divided into extents as the real one is, so that a lease fits here if
    it fits there.
    """

    def __init__(self, nbytes: int) -> None:
        self.capacity_bytes = nbytes - nbytes % PIECE_ALIGN
        self._extents = best_extents()(self.capacity_bytes, PIECE_ALIGN)
        self._peak_bytes = 0

    def lease(self, nbytes: int, what: str = "a block") -> VirtualLease:
        lease = self.try_lease(nbytes)
        if lease is None:
            free = self.capacity_bytes - self._extents.used
            raise CapacityError(
                f"host pool: {what} needs {format_size(nbytes)} ({nbytes} bytes), "
                f"{format_size(free)} of {format_size(self.capacity_bytes)} are free, the largest "
                f"piece is {format_size(self._extents.largest_free)}; raise host_memory"
            )
        return lease

    def try_lease(self, nbytes: int) -> VirtualLease | None:
        size = max(nbytes, 1)
        begin = self._extents.find(size)
        if begin is None:
            return None
        self._extents.take_at(begin, size)
        self._peak_bytes = max(self._peak_bytes, self._extents.used)
        return VirtualLease(self._extents, begin, nbytes)

    def stats(self) -> PoolStats:
        return PoolStats(self.capacity_bytes, self._extents.used, self._peak_bytes)


class VirtualLease:
    """A lease that returns its extent to the pool when the one tensor made on it is freed."""

    def __init__(self, extents: Extents, begin: int, nbytes: int) -> None:
        self._extents, self._begin, self._nbytes = extents, begin, nbytes

    def tensor(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        memory = torch.empty(self._nbytes // dtype.itemsize, dtype=dtype, device="meta")
        weakref.finalize(memory, self._extents.give_back, self._begin).atexit = False
        return memory

    def __enter__(self) -> VirtualLease:
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep the lease: it ends with its tensor."""
