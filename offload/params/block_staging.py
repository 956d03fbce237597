"""The parameters of a prepared model for their update: where they are, in host memory.

The update works on chunks of state; here it gets the parameters and gradients that belong to a
chunk. A block comes for its first chunk and stays until its last; then its new values are the
block's own, and go to the store if it may have to leave memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import torch
from torch import Tensor

from offload.core.errors import CapacityError
from offload.optim.spilled_gradient import Gradient
from offload.optim.staging import Arriving, Awaited, StagingBuffer
from offload.params.block import Block, Presence
from offload.params.residency import Residency
from offload.planning.layout import Chunk, Slice


class Staging(Protocol):
    """Brings gradients that are not in memory, a chunk's at a time."""

    def begin(self, grads: Mapping[int, Gradient], chunks: Iterable[Chunk]) -> None:
        """An update of these begins."""

    def has_place(self, chunk: Chunk) -> bool:
        """Whether `take` need not wait."""

    def take(self, chunk: Chunk) -> Mapping[Slice, ArrivingSlice]:
        """Start the way of those of a chunk that are not in memory."""

    def give_back(self, chunk: Chunk) -> None:
        """The update is done with them."""

    def end(self) -> None:
        """No update is under way any more."""


class ArrivingSlice(Awaited, Protocol):
    """A slice of a gradient on its way."""

    values: Tensor


MOST_BLOCKS = 3  # one that is worked on, those that come


class _Arrival:
    """A block on its way into host memory."""

    def __init__(self, block: Block, residency: Residency) -> None:
        self._block, self._residency = block, residency

    @property
    def done(self) -> bool:
        return self._residency.has_come(self._block)

    def wait(self) -> None:
        self._residency.await_arrival(self._block)


class BlockStaging:
    """Staging buffers of a prepared model. places: of each parameter by number, its block and the
    bytes of it there. staging: brings gradients that are spilled; None: none is. firsts: elements
    at which gradients begin, where they are not whole.
    """

    def __init__(
        self,
        residency: Residency,
        places: Mapping[int, tuple[Block, int, torch.dtype]],
        staging: Staging | None = None,
        firsts: Mapping[int, int] | None = None,
    ) -> None:
        self._residency = residency
        self._staging = staging
        self._places = places
        self._firsts = firsts or {}
        self._grads: Mapping[int, Gradient] = {}
        self._begun: dict[int, Block] = {}
        self._left: Counter[int] = Counter()  # chunks of each block that are not done
        self._chunk_of: dict[int, Chunk] = {}  # by the staging buffer it is on

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, Arriving]
    ) -> None:
        self._grads = grads
        self.break_off()
        self._residency.collect_edits()
        self._residency.updating(list({self._places[number][0] for number in grads}))

    def end_step(self) -> None:
        assert not self._begun, "every block that was begun has been ended"
        self._grads = {}  # they belong to the parameters
        self._end_staging()
        self._residency.watch_edits()
        self._residency.look_ahead()

    def _end_staging(self) -> None:
        if self._staging is not None:
            self._staging.end()

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        """Block by block: first those whose state is at hand, then those that are in memory
        themselves. Both would have to go otherwise.
        """
        self._left = Counter(self._block(chunk).number for chunk in chunks)
        if self._staging is not None:
            self._staging.begin(self._grads, chunks)
        first = {self._block(chunk).number for chunk in chunks if chunk.number in at_hand}

        def rank(chunk: Chunk) -> tuple[bool, bool, int]:
            block = self._block(chunk)
            return block.number not in first, block.in_host is Presence.AWAY, block.number

        return sorted(chunks, key=rank)

    def needs(self, chunk: Chunk) -> bool:
        return True

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        if self._staging is not None and not self._staging.has_place(chunk):
            return False  # a chunk that is coming has what it needs
        block = self._block(chunk)
        if block.number in self._begun:
            return True
        if len(self._begun) < MOST_BLOCKS and self._residency.try_begin(block):
            self._begun[block.number] = block
            return True
        return may_wait

    def take(self, chunk: Chunk) -> StagingBuffer:
        if not self.has_place(chunk, may_wait=False):
            block = self._block(chunk)
            raise CapacityError(
                f"{block.name}: its {block.nbytes} bytes of parameters have no room for their "
                "update; raise host_memory"
            )
        block = self._block(chunk)
        assert block.memory is not None
        staging_buffer = StagingBuffer(block.memory, tickets=[_Arrival(block, self._residency)])
        self._chunk_of[id(staging_buffer)] = chunk
        coming = self._staging.take(chunk) if self._staging is not None else {}
        staging_buffer.tickets += coming.values()
        for part in chunk.slices:
            if part.param in self._grads:
                _, begin, dtype = self._places[part.param]
                begin += part.begin * dtype.itemsize
                end = begin + (part.end - part.begin) * dtype.itemsize
                param = block.memory[begin:end].view(dtype)
                staging_buffer.slices[part] = param, self._gradient(part, coming)
        return staging_buffer

    def _gradient(self, part: Slice, coming: Mapping[Slice, ArrivingSlice]) -> Tensor:
        if part in coming:
            return coming[part].values
        grad, first = self._grads[part.param], self._firsts.get(part.param, 0)
        assert isinstance(grad, Tensor), "what is spilled is staged"
        return grad[part.begin - first : part.end - first]

    def values(self, part: Slice) -> Tensor:
        block, begin, dtype = self._places[part.param]
        begin += part.begin * dtype.itemsize
        end = begin + (part.end - part.begin) * dtype.itemsize
        return self._residency.host_memory_of(block)[begin:end].view(dtype)

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        self._leave(staging_buffer, has_changed=True)

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        self._leave(staging_buffer, has_changed=False)

    def _leave(self, staging_buffer: StagingBuffer, has_changed: bool) -> None:
        chunk = self._chunk_of.pop(id(staging_buffer), None)
        if chunk is None:
            return  # something raised when it was given back
        block = self._block(chunk)
        staging_buffer.slices = {}  # views of the block
        if self._staging is not None:
            self._staging.give_back(chunk)
        staging_buffer.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._left[block.number] -= 1
        if not self._left[block.number]:
            self._residency.end(self._begun.pop(block.number), has_changed)

    def _block(self, chunk: Chunk) -> Block:
        return self._places[chunk.slices[0].param][0]

    def break_off(self) -> None:
        """After an error some blocks have not been ended."""
        self._chunk_of.clear()
        self._end_staging()
        while self._begun:
            _, block = self._begun.popitem()
            self._residency.end(block, has_changed=True)

    def close(self) -> None:
        self.break_off()
