"""The tiers of the state chunks: some are resident in leases of the host pool, the others in the
store.

Disk chunks pass through a fixed number of buffers. The last ones stay there dirty until another
chunk needs the buffer: the next step begins with them, and they are neither read nor written in
between. A chunk that was never written has no bytes yet and begins as zeros. One thread at a time;
beside it a watcher may read bytes as long as they do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.kernels import SUM_BYTES
from offload.planning.layout import ELEMENT_BYTES, Chunk, Slice
from offload.planning.state_plan import Plan
from offload.storage.disk import DiskStore
from offload.storage.engine import KnownSums, Priority

_KEY = "state chunk "


@dataclass(frozen=True)
class HostChunk:
    """A chunk in host memory. `memory`: its fields, flat fp32; `whole`: the buffer that it lies in;
    `sums`: the known checksums of its present bytes, 0 where one is not known; None: they are of no
    use.
    """

    chunk: Chunk
    memory: Tensor
    whole: Tensor
    sums: KnownSums | None = None

    def fields(self, part: Slice) -> dict[str, Tensor]:
        """Return the elements of each field that belong to a slice of the chunk."""
        found = {}
        for field in self.chunk.fields:
            begin = self.chunk.begins[field] + part.offset
            found[field] = self.memory[begin : begin + part.end - part.begin]
        return found

    def sums_of(self, part: Slice) -> dict[str, KnownSums]:
        """Return the entries of `sums` for each field of a slice, where its elements begin at a
        multiple of `SUM_BYTES`.
        """
        found: dict[str, KnownSums] = {}
        count = (part.end - part.begin) * ELEMENT_BYTES // SUM_BYTES
        if self.sums is None or not count:
            return found
        for field in self.chunk.fields:
            begin = (self.chunk.begins[field] + part.offset) * ELEMENT_BYTES
            if begin % SUM_BYTES == 0:
                found[field] = self.sums[begin // SUM_BYTES :][:count]
        return found


class ChunkWatcher(Protocol):
    """An observer that copies the bytes of some chunks before they change. Its errors do not reach
    the update.
    """

    def before_change(self, piece: HostChunk) -> None:
        """Copy the chunk's bytes, which are in the piece, if they are needed: they change when this
        has returned.
        """

    def before_release(self, piece: HostChunk) -> None:
        """Stop using the piece's memory: it is another chunk's when this has returned. The bytes
        are on disk.
        """

    def settle(self) -> None:
        """Wait until the watcher needs nothing of the tiers any more."""


class Tiers:
    """The tiers of one optimizer's state: where each chunk is, its reads and its writes.

    resident: the chunks that stay in host memory, by number. unwritten: the disk chunks that are
    dirty, whose newest bytes are in a buffer only. free: the buffers that hold no chunk.
    """

    def __init__(self, plan: Plan, pool: Pool | None, store: DiskStore | None) -> None:
        self.plan = plan
        self._store: DiskStore = store  # type: ignore[assignment]  # None: no chunk is on disk
        self.resident: dict[int, HostChunk] = {}
        for chunk in plan.chunks:
            if chunk.number in plan.resident:
                memory = leased(pool, chunk.nbytes, chunk.name, torch.float32).zero_()
                self.resident[chunk.number] = HostChunk(chunk, memory, memory)
        self.free = [
            leased(pool, plan.buffer_bytes, "a buffer", torch.float32) for _ in range(plan.buffers)
        ]
        self._written: set[int] = set()  # disk chunks that have bytes on disk
        self.unwritten: dict[int, HostChunk] = {}
        self.watcher: ChunkWatcher | None = None

    def needs_buffer(self, chunk: Chunk) -> bool:
        """Return whether `read` takes a buffer: the chunk's newest bytes are on disk."""
        return not (chunk.number in self.resident or chunk.number in self.unwritten)

    def read(
        self, chunk: Chunk, priority: Priority = Priority.PREFETCH
    ) -> tuple[HostChunk, Ticket[None]]:
        """Start a read of the disk chunk into a buffer, which holds it once the ticket is done. If
        it needs a buffer, one must be free.
        """
        if chunk.number in self.unwritten:
            return self.unwritten[chunk.number], Ticket.of(None, f"{chunk.name} is in its buffer")
        whole = self.free.pop()
        sums: KnownSums = np.zeros(-(-chunk.nbytes // SUM_BYTES), dtype=np.uint64)
        piece = HostChunk(chunk, whole[: chunk.nbytes // whole.element_size()], whole, sums)
        try:
            if chunk.number in self._written:
                return piece, self._store.read(_key(chunk), piece.memory, priority)
            piece.memory.zero_()
            return piece, Ticket.of(None, f"zeros for {chunk.name}")
        except BaseException:
            self.give_back(piece)
            raise

    def copy_into(self, memory: Tensor, chunk: Chunk) -> Ticket[None]:
        """Start a read of the bytes that a chunk has on disk now into the caller's memory. Any
        thread may call it.
        """
        return self._store.read(_key(chunk), memory, Priority.PREFETCH)

    def before_change(self, piece: HostChunk) -> None:
        """Announce that the caller is about to change a chunk."""
        if piece.sums is not None:
            piece.sums.fill(0)
        watcher = self.watcher  # another thread may set it to None meanwhile
        if watcher is not None:
            watcher.before_change(piece)

    def settle(self) -> None:
        """Wait until no watcher is left."""
        watcher = self.watcher
        if watcher is not None:
            watcher.settle()

    def write(self, piece: HostChunk) -> Ticket[None]:
        """Start to write back a disk chunk; its buffer must not change before the ticket is done. A
        chunk that is not given back after that, because the write failed, say, stays in its buffer.
        """
        ticket = self._store.write(_key(piece.chunk), piece.memory, sums=piece.sums)
        self._written.add(piece.chunk.number)
        return ticket

    def forget(self) -> None:
        """Discard all bytes on disk and in buffers; disk chunks begin as zeros again."""
        self.settle()
        self._written.clear()
        for piece in tuple(self.unwritten.values()):
            self.give_back(piece)

    def give_back(self, piece: HostChunk) -> None:
        """Free the buffer of a chunk whose newest bytes are on disk."""
        watcher = self.watcher
        if watcher is not None:
            watcher.before_release(piece)
        self.unwritten.pop(piece.chunk.number, None)
        self.free.append(piece.whole)


def leased(pool: Pool | None, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Lease memory for as long as the tensor lives. pool: None if nothing is held."""
    if not nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    assert pool is not None, "a plan that holds memory has a pool"
    return pool.lease(nbytes, what=what).tensor(dtype)


def _key(chunk: Chunk) -> str:
    return f"{_KEY}{chunk.number}: {chunk.name}"


def is_chunk_key(name: str) -> bool:
    """Return whether the store's entry is a chunk of optimizer state."""
    return name.startswith(_KEY)
