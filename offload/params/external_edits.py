"""External edits: changes of resident parameters by code that is not the engine's, found
afterwards.

Values that were written in place are found by a checksum of the block, taken before user code runs;
values that were assigned by `param.data = ...` by their address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.params.block import Block
from offload.params.block_store import BlockStore
from offload.params.placeholder import restore


class ExternalEdits:
    """The external edits of blocks that are attached in host memory. checksum: computes that of a
    block's memory. One thread at a time.
    """

    def __init__(self, store: BlockStore, checksum: Callable[[Tensor], int]) -> None:
        self._store = store
        self._checksum = checksum
        self.may_come = False  # user code may write in place

    def note(self, block: Block) -> None:
        """Look for changes that a layer made in place to its own parameters while it ran. Finds
        those that torch counts in the version of a parameter.
        """
        if block.is_attached and block.version != block.version_now:
            self._store.changed(block, is_counted=True)

    def begin(self, blocks: Iterable[Block]) -> None:
        """Begin to look for edits in place: take a checksum of each attached block whose bytes are
        stored or being written, unless it has one.
        """
        self.may_come = True
        for block in blocks:
            self.note(block)
            is_safe = block.is_stored or block.writing is not None
            if block.is_attached and block.nbytes and is_safe and block.seen is None:
                assert block.memory is not None
                block.seen = self._checksum(block.memory)

    def take_in(self, blocks: Iterable[Block]) -> None:
        """Mark the blocks with edits as changed; their memory has the edits then."""
        # This frame holds no memory of a block: the traceback of an error would keep it alive.
        blocks = [block for block in blocks if block.is_attached and block.memory is not None]
        rebound = untangle([(b, b.memory) for b in blocks if b.memory is not None])
        for block in blocks:
            is_other = block.number in rebound and take_in_rebound(block, settle=self._store.settle)
            if self.may_come and block.seen is not None:
                assert block.memory is not None
                is_other |= block.seen != self._checksum(block.memory)
            if is_other:
                self._store.changed(block)


def untangle(places: Sequence[tuple[Block, Tensor]]) -> set[int]:
    """Give parameters memory of their own if user code has made them views of another's memory, or
    other views of their own, by `a.data, b.data = b.data, a.data` or `w.data = w.data.t()`. So the
    order in which they are taken in does not matter. places: blocks, and the memory that they are
    computed with. Return the numbers of the blocks with parameters that are elsewhere.
    """
    rebound: set[int] = set()
    for block, memory in places:
        for member in block.strangers(memory.data_ptr()):
            rebound.add(block.number)
            address = member.param.untyped_storage().data_ptr()
            if any(address == each.untyped_storage().data_ptr() for _, each in places):
                member.param.data = member.param.data.clone()
    return rebound


def take_in_rebound(
    block: Block, memory: Tensor | None = None, settle: Callable[[Block], None] | None = None
) -> bool:
    """Copy values that user code has assigned by `param.data = ...` to the block's memory, and make
    the parameters views of it again. Return False if there were none. Raises `StateError` if the
    values are of another shape or dtype or on another device; nothing is copied then. memory: where
    the block is computed with; None: its host memory.
    """
    memory = block.memory if memory is None else memory
    assert memory is not None
    strange = block.strangers(memory.data_ptr())
    for member in strange:  # no view of the memory yet: an error's frames would hold it
        got = _kind(member.param.dtype, member.param.shape, member.param.device)
        expected = _kind(member.dtype, member.shape, memory.device)
        if got != expected:
            raise StateError(
                f"{member.name}: expected {expected}, as it was prepared, got {got} by .data = "
                "...; convert the values, not the parameter"
            )
    if not strange:
        return False
    names = {member.name for member in strange}
    places = [(m, values) for m, values in block.views(memory) if m.name in names]
    if settle is not None:
        settle(block)
    for member, values in places:
        values.copy_(member.param.detach())
        restore(member.param, values)
    return True


def _kind(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype} {tuple(shape)} on {device}"
