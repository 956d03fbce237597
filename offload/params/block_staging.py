"""The staging of a prepared model's parameters for their update, in host memory.

The update works on chunks of state; here it gets the parameters and gradients that belong to a
chunk. A block is fetched for its first chunk and kept until its last; then its new values are the
block's own, and are written back to the store unless host memory has room for all blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.core.errors import CapacityError
from offload.optim.gradient_source import Gradient
from offload.optim.staging import HostSum, StagingBuffer
from offload.params.block import Block, Presence
from offload.params.host_cache import HostCache
from offload.params.residency import Residency
from offload.params.spill import LINE, SpillArea, SpillSlot
from offload.params.spilled_gradient import (
    SpilledGradientPart,
    SpilledGradientValues,
    StagedGradientRange,
)
from offload.planning.layout import Chunk, Slice, round_up

MOST_BLOCKS = 3  # one that is updated, and those that are being fetched


@dataclass(frozen=True)
class _Arrival:
    """The fetch of a block into host memory, as an object to wait for."""

    block: Block
    cache: HostCache

    @property
    def done(self) -> bool:
        reading = self.block.reading  # another thread may take the block in
        return reading is None or reading.done

    def wait(self) -> None:
        self.cache.await_arrival(self.block)


class BlockStaging:
    """The staging buffers of a prepared model's update: views of the blocks themselves.

    places: for each parameter, by its number, the block, the parameter's first byte in it, and its
    dtype.
    staging: fetches spilled gradients; None: there are none.
    firsts: the element at which a gradient begins, for gradients that are not whole.
    """

    def __init__(
        self,
        residency: Residency,
        places: Mapping[int, tuple[Block, int, torch.dtype]],
        staging: SpilledGradientReader | None = None,
        firsts: Mapping[int, int] | None = None,
    ) -> None:
        self._residency = residency
        self._staging = staging
        self._places = places
        self._firsts = firsts or {}
        self._grads: Mapping[int, Gradient] = {}
        self._begun: dict[int, Block] = {}
        self._block_of: dict[int, Block] = {}  # by the number of a chunk
        self._left: Counter[int] = Counter()  # chunks of each block that are not updated yet
        self._chunk_of: dict[int, Chunk] = {}  # by the id of its staging buffer

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, HostSum]
    ) -> None:
        self._grads = grads
        self.break_off()
        self._residency.tier.collect_edits([*{self._places[number][0] for number in grads}])

    def end_step(self) -> None:
        assert not self._begun, "every block that was begun has been ended"
        self._grads = {}  # they belong to the parameters
        self.break_off()
        self._residency.tier.end_update()

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        """Order the chunks block by block: first the blocks with state in memory (`at_hand`), then
        the blocks that are resident. In another order both would be evicted before their turn.
        """
        self._block_of = of = {c.number: self._places[c.slices[0].param][0] for c in chunks}
        self._left = Counter(block.number for block in of.values())
        if self._staging is not None:
            self._staging.begin(self._grads, chunks)
        first = {block.number for number, block in of.items() if number in at_hand}
        ranks = {
            number: (block.number not in first, block.in_host is Presence.AWAY, block.number)
            for number, block in of.items()
        }
        return sorted(chunks, key=lambda chunk: ranks[chunk.number])

    def needs(self, chunk: Chunk) -> bool:
        return True

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        if self._staging is not None and not self._staging.has_place(chunk):
            return False  # a chunk that is being fetched has what it needs
        block = self._block_of[chunk.number]
        if block.number in self._begun:
            return True
        if len(self._begun) < MOST_BLOCKS and self._residency.cache.try_begin(block):
            self._begun[block.number] = block
            return True
        return may_wait

    def take(self, chunk: Chunk) -> StagingBuffer:
        block = self._block_of[chunk.number]
        if not self.has_place(chunk, may_wait=False):
            raise CapacityError(
                f"{block.name}: its {block.nbytes} bytes of parameters have no room for their "
                "update; raise host_memory"
            )
        assert block.memory is not None
        staging_buffer = StagingBuffer(
            block.memory, tickets=[_Arrival(block, self._residency.cache)]
        )
        self._chunk_of[id(staging_buffer)] = chunk
        coming = self._staging.take(chunk) if self._staging is not None else {}
        staging_buffer.tickets += coming.values()
        for part in chunk.slices:
            if part.param not in self._grads:
                continue
            _, begin, dtype = self._places[part.param]
            begin += part.begin * dtype.itemsize
            end = begin + (part.end - part.begin) * dtype.itemsize
            if part in coming:
                grad = coming[part].values
            else:
                whole, first = self._grads[part.param], self._firsts.get(part.param, 0)
                assert isinstance(whole, Tensor), "what is spilled is staged"
                grad = whole[part.begin - first : part.end - first]
            staging_buffer.slices[part] = block.memory[begin:end].view(dtype), grad
        return staging_buffer

    def values(self, part: Slice) -> Tensor:
        block, begin, dtype = self._places[part.param]
        begin += part.begin * dtype.itemsize
        end = begin + (part.end - part.begin) * dtype.itemsize
        return self._residency.cache.memory_of(block)[begin:end].view(dtype)

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        self._leave(staging_buffer, has_changed=True)

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        self._leave(staging_buffer, has_changed=False)

    def _leave(self, staging_buffer: StagingBuffer, has_changed: bool) -> None:
        chunk = self._chunk_of.pop(id(staging_buffer), None)
        if chunk is None:
            return  # already given back: before an error, or by `break_off`
        block = self._block_of[chunk.number]
        staging_buffer.slices = {}  # views of the block
        if self._staging is not None:
            self._staging.give_back(chunk)
        staging_buffer.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._left[block.number] -= 1
        if not self._left[block.number]:
            self._residency.end(self._begun.pop(block.number), has_changed)

    def break_off(self) -> None:
        """Release the blocks that an update left pinned when an error ended it."""
        self._chunk_of.clear()
        if self._staging is not None:
            self._staging.end()
        while self._begun:
            _, block = self._begun.popitem()
            self._residency.end(block, has_changed=True)


class SpilledGradientReader:
    """A reader of spilled gradients for the update: it stages the slices of each chunk of state in
    one slot of the area. firsts: by the number of a parameter, the element at which its gradient
    begins, for gradients that are not whole.
    """

    def __init__(self, area: SpillArea, firsts: Mapping[int, int]) -> None:
        self._area, self._firsts = area, firsts
        self._cold: dict[int, SpilledGradientPart] = {}
        self._slots: dict[int, SpillSlot] = {}  # by the number of the chunk

    def begin(self, grads: Mapping[int, Tensor | Gradient], chunks: Iterable[Chunk]) -> None:
        """Begin an update of these gradients; cut those anew that are not cut as `chunks` are."""
        self.end()
        self._cold = {n: one for n, one in grads.items() if isinstance(one, SpilledGradientPart)}
        wanted: dict[SpilledGradientValues, set[int]] = {}
        wrong: dict[SpilledGradientValues, set[int]] = {}
        for chunk in chunks:
            for _, whose, begin, end in self._cold_in(chunk):
                cuts = wanted.setdefault(whose, {0, whose.cuts[-1]})
                cuts.update((begin, end))
                if whose.range_of(begin, end) is None:
                    wrong[whose] = cuts
        for whose, cuts in wrong.items():
            whose.cut_anew(sorted(cuts))

    def _cold_in(self, chunk: Chunk) -> Iterator[tuple[Slice, SpilledGradientValues, int, int]]:
        """Yield a chunk's spilled slices, each with the elements [begin, end) that it is there."""
        for part in chunk.slices:
            cold = self._cold.get(part.param)
            if cold is not None:
                begin = cold.begin + part.begin - self._firsts.get(part.param, 0)
                yield part, cold.whose, begin, begin + part.end - part.begin

    def has_place(self, chunk: Chunk) -> bool:
        """Return whether `take` would not wait for a slot."""
        return not any(self._cold_in(chunk)) or self._area.has_free()

    def take(self, chunk: Chunk) -> dict[Slice, StagedGradientRange]:
        """Begin to read a chunk's spilled slices into one slot. Waits if no slot is free."""
        found: dict[Slice, StagedGradientRange] = {}
        slot, at = None, 0
        for part, whose, begin, end in self._cold_in(chunk):
            if slot is None:
                with self._area.lock:  # until it is staged, others may find it free
                    slot = self._slots[chunk.number] = self._area.take()
                    slot.is_staged = True
            piece = whose.range_of(begin, end)
            assert piece is not None, "cut for this plan"
            nbytes = round_up((end - begin) * whose.dtype.itemsize, LINE)
            found[part] = StagedGradientRange(whose, piece, slot.memory[at : at + nbytes], slot)
            at += nbytes
        return found

    def give_back(self, chunk: Chunk) -> None:
        """Return the chunk's slot to the area once the update has used its slices."""
        slot = self._slots.pop(chunk.number, None)
        if slot is not None:
            slot.is_staged = False

    def end(self) -> None:
        """End the update: return all its slots to the area and release the gradients."""
        for slot in self._slots.values():
            slot.is_staged = False
        self._slots.clear()
        self._cold = {}
