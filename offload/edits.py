"""What others do to parameters that are in memory, by whatever means: found afterwards.

Values that were written in place are found by a checksum of the block, taken before others get
their turn; values that were put there by `param.data = ...` by their address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from offload import kernels
from offload.block import Block
from offload.errors import StateError
from offload.guard import unguard


class Edits:
    """To blocks that are attached in host memory. settle: is called with a block before its memory
    changes. One thread at a time.
    """

    def __init__(self, settle: Callable[[Block], None]) -> None:
        self._settle = settle
        self._may_come = False  # others have their turn

    def begin(self, blocks: Iterable[Block]) -> None:
        """From now on there may be some."""
        self._may_come = True
        for block in blocks:
            is_safe = block.is_stored or block.writing is not None
            if block.is_attached and block.nbytes and is_safe and block.seen is None:
                assert block.memory is not None
                block.seen = kernels.checksum(block.memory)

    def end(self) -> None:
        """From now on there are none, in place."""
        self._may_come = False

    def found(self, block: Block) -> bool:
        """Whether there were any to this block. It has them then."""
        assert block.memory is not None
        is_other = self.take_in_rebound(block)
        if self._may_come and block.seen is not None:
            is_other |= block.seen != kernels.checksum(block.memory)
        return is_other

    def take_in_rebound(self, block: Block) -> bool:
        """Of `found`, what needs no look at all the bytes."""
        assert block.memory is not None
        return take_in_rebound(block, block.memory, self._settle)


def untangle(places: Iterable[tuple[Block, Tensor]]) -> None:
    """Give parameters memory of their own that somebody has put into that of another, or another
    way into their own, by `a.data, b.data = b.data, a.data` or `w.data = w.data.t()`. So it does
    not matter which of them is taken in first. places: blocks, and where they are computed with.
    """
    places = list(places)
    rebound = [m.param for block, memory in places for m in block.strangers(memory.data_ptr())]
    if rebound:
        ours = {memory.untyped_storage().data_ptr() for _, memory in places}
        for param in rebound:
            if param.untyped_storage().data_ptr() in ours:
                param.data = param.data.clone()


def take_in_rebound(
    block: Block, memory: Tensor, settle: Callable[[Block], None] | None = None
) -> bool:
    """Copy values that somebody has put into parameters by `param.data = ...` to the block's
    memory, and the parameters are there again. False: there were none. Raises `StateError` where
    the values are of another shape or type or on another device; nothing is copied then.
    """
    names = {member.name for member in block.strangers(memory.data_ptr())}
    if not names:
        return False
    places = [(m, values) for m, values in block.views(memory) if m.name in names]
    for member, values in places:
        got, expected = _kind(member.param), _kind(values)
        if got != expected:
            raise StateError(
                f"{member.name}: expected {expected}, as it was prepared, got {got} by .data = "
                "...; convert the values, not the parameter"
            )
    if settle is not None:
        settle(block)
    for member, values in places:
        values.copy_(member.param.detach())
        unguard(member.param, values)
    return True


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
