"""The bytes of the chunks: some in leases of the host pool for good, the others in the store.

Disk chunks pass through a fixed number of buffers. Those that came last stay there, unwritten,
until a buffer is needed for another: the next step begins with them, and neither reads nor writes
them in between. A chunk that was never written has no bytes yet and begins as zeros. One thread at
a time; beside it a watcher may look at bytes as long as they do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.kernels import SUM_BYTES
from offload.planning.layout import ELEMENT_BYTES, Chunk, Slice
from offload.planning.planner import Plan
from offload.storage.contract import KnownSums
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority

_KEY = "state chunk "


@dataclass(frozen=True)
class HostChunk:
    """A chunk in host memory. `memory`: its fields, flat fp32; `whole`: the buffer it lies in;
    `sums`: what is known of the checksums of its bytes as they are, 0 where nothing is; None: they
    are of no use.
    """

    chunk: Chunk
    memory: Tensor
    whole: Tensor
    sums: KnownSums | None = None

    def fields(self, part: Slice) -> dict[str, Tensor]:
        """The elements of each field that belong to a slice of the chunk."""
        found = {}
        for field in self.chunk.fields:
            begin = self.chunk.begin_of(field) + part.offset
            found[field] = self.memory[begin : begin + part.end - part.begin]
        return found

    def sums_of(self, part: Slice) -> dict[str, KnownSums]:
        """Room for the checksums of each field of a slice, where they begin together."""
        found: dict[str, KnownSums] = {}
        count = (part.end - part.begin) * ELEMENT_BYTES // SUM_BYTES
        if self.sums is None or not count:
            return found
        for field in self.chunk.fields:
            begin = (self.chunk.begin_of(field) + part.offset) * ELEMENT_BYTES
            if begin % SUM_BYTES == 0:
                found[field] = self.sums[begin // SUM_BYTES :][:count]
        return found


class Watcher(Protocol):
    """Somebody who wants the bytes of some chunks as they are now. His errors are his own."""

    def before_change(self, piece: HostChunk) -> None:
        """The chunk's bytes, which are in the piece, are others when this has returned."""

    def before_release(self, piece: HostChunk) -> None:
        """The piece's memory is another chunk's when this has returned; its bytes are on disk."""

    def settle(self) -> None:
        """Return when it needs nothing from here any more."""


class Tiers:
    """Where each chunk is, and the way to it and back."""

    def __init__(self, plan: Plan, pool: Pool | None, store: DiskStore | None) -> None:
        self.plan = plan
        self._store = store
        self._resident = {
            chunk.number: _memory(pool, chunk.nbytes, chunk.name).zero_()
            for chunk in plan.chunks
            if chunk.number in plan.resident
        }
        self._free = [_memory(pool, plan.buffer_bytes, "a buffer") for _ in range(plan.buffers)]
        self._written: set[int] = set()  # disk chunks that have bytes
        self._unwritten: dict[int, HostChunk] = {}  # whose newest bytes are in a buffer only
        self.watcher: Watcher | None = None

    def is_resident(self, chunk: Chunk) -> bool:
        return chunk.number in self._resident

    def resident(self, chunk: Chunk) -> HostChunk:
        memory = self._resident[chunk.number]
        return HostChunk(chunk, memory, memory)

    def needs_buffer(self, chunk: Chunk) -> bool:
        """Whether `read` takes one: the chunk is on disk, and its newest bytes are there."""
        return not (self.is_resident(chunk) or self.is_unwritten(chunk))

    def is_unwritten(self, chunk: Chunk) -> bool:
        return chunk.number in self._unwritten

    @property
    def unwritten(self) -> Sequence[HostChunk]:
        return tuple(self._unwritten.values())

    @property
    def free_buffers(self) -> int:
        return len(self._free)

    def read(
        self, chunk: Chunk, priority: Priority = Priority.PREFETCH
    ) -> tuple[HostChunk, Ticket[None]]:
        """A buffer that holds the disk chunk once the ticket is done. There must be a free one if
        it needs one.
        """
        if chunk.number in self._unwritten:
            return self._unwritten[chunk.number], Ticket.of(None, f"{chunk.name} is in its buffer")
        whole = self._free.pop()
        sums: KnownSums = np.zeros(-(-chunk.nbytes // SUM_BYTES), dtype=np.uint64)
        piece = HostChunk(chunk, whole[: chunk.nbytes // whole.element_size()], whole, sums)
        try:
            if chunk.number in self._written:
                return piece, self._disk().read(_key(chunk), piece.memory, priority)
            piece.memory.zero_()
            return piece, Ticket.of(None, f"zeros for {chunk.name}")
        except BaseException:
            self.give_back(piece)
            raise

    def copy_into(self, memory: Tensor, chunk: Chunk) -> Ticket[None]:
        """Fill somebody else's memory with the bytes that a chunk has on disk at this moment. Any
        thread.
        """
        return self._disk().read(_key(chunk), memory, Priority.PREFETCH)

    def before_change(self, piece: HostChunk) -> None:
        """Whoever is about to change a chunk says so."""
        if piece.sums is not None:
            piece.sums.fill(0)
        watcher = self.watcher  # it goes when it has seen enough
        if watcher is not None:
            watcher.before_change(piece)

    def settle(self) -> None:
        """Return when nobody watches any more."""
        watcher = self.watcher
        if watcher is not None:
            watcher.settle()

    def change(self, piece: HostChunk) -> None:
        """The buffer's bytes are the chunk's newest from now on, until it is given back."""
        self._unwritten[piece.chunk.number] = piece

    def write(self, piece: HostChunk) -> Ticket[None]:
        """Store a disk chunk; its buffer must not change before the ticket is done. What is not
        given back after that, because it failed, say, stays where it is.
        """
        ticket = self._disk().write(_key(piece.chunk), piece.memory, sums=piece.sums)
        self._written.add(piece.chunk.number)
        return ticket

    def forget(self) -> None:
        """Nothing that lies on disk counts any more; chunks begin as zeros again."""
        self.settle()
        self._written.clear()
        for piece in self.unwritten:
            self.give_back(piece)

    def give_back(self, piece: HostChunk) -> None:
        """The chunk's newest bytes are on disk; its buffer is free."""
        watcher = self.watcher
        if watcher is not None:
            watcher.before_release(piece)
        self._unwritten.pop(piece.chunk.number, None)
        self._free.append(piece.whole)

    def _disk(self) -> DiskStore:
        if self._store is None:
            raise StateError("optimizer state: the plan has chunks on disk, but no store is open")
        return self._store


def _memory(pool: Pool | None, nbytes: int, what: str) -> Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    assert pool is not None, "a plan that holds memory has a pool"
    with pool.lease(nbytes, what=what) as lease:  # the tensor keeps the memory
        return lease.tensor(torch.float32)


def _key(chunk: Chunk) -> str:
    return f"{_KEY}{chunk.number}: {chunk.name}"


def is_chunk_key(name: str) -> bool:
    """Whether a store's entry is one of ours."""
    return name.startswith(_KEY)
