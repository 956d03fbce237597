"""Copies of blocks to compute with. The parameters are views of a copy while it is in use, and
placeholders while it is not. Subclasses decide where a copy's memory is and how it is filled
(`device_tier.py`, `gathered_tier.py`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from offload.params.block import Block, DevicePins
from offload.params.placeholder import Owner, make_device_placeholder, placeholder_storage, restore


class Copies(DevicePins, ABC):
    """The copies of one model's blocks, on one device.

    take_back: called with a block whose parameters were changed, before they are hidden.
    lock: callers hold it.
    """

    def __init__(
        self,
        device: torch.device,
        owner: Owner,
        take_back: Callable[[Block], None],
        lock: threading.RLock,
    ) -> None:
        self.kept: set[int] = set()  # blocks whose copies stay as long as they are valid
        self._device = device
        self._owner = owner
        self._take_back = take_back
        self._lock = lock
        self._by_address: dict[int, Block] = {}
        self._versions: dict[int, int] = {}  # of what is attached, when it was
        self._current: frozenset[int] = frozenset()  # blocks of the latest use
        self._placeholder_storage: dict[torch.dtype, Tensor] = {}

    @abstractmethod
    def memory_of(self, block: Block) -> Tensor:
        """Return the copy's bytes, to compute with now; they stay as long as the tensor is held."""

    @abstractmethod
    def address_of(self, block: Block) -> int:
        """Return the address at which the copy begins."""

    def block_of(self, tensor: Tensor) -> Block | None:
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def is_in_place(self, block: Block) -> bool:
        """Return whether all the block's parameters are still the views that were attached."""
        return not block.strangers(self.address_of(block))

    def attach(self, block: Block) -> None:
        """Make the parameters views of the copy, for the computation that runs now."""
        memory = self.memory_of(block)
        if not block.is_attached:
            for member, values in block.views(memory):
                restore(member.param, values)
            self.note_seen(block)
            block.is_attached = True

    def detach(self, block: Block) -> None:
        """Make the parameters placeholders, after changes are taken back. The copy's bytes stay
        where they are.
        """
        if block.is_attached and (
            _versions(block) != self._versions[block.number] or not self.is_in_place(block)
        ):
            self._take_back(block)
        self.hide(block)
        block.is_attached = False

    def hide(self, block: Block) -> None:
        for member in block.unit.members:
            dtype = member.dtype
            if dtype not in self._placeholder_storage:
                self._placeholder_storage[dtype] = placeholder_storage(dtype, self._device)
            make_device_placeholder(member.param, self._owner, self._placeholder_storage[dtype])

    def note_seen(self, block: Block) -> None:
        """Note that all changes to the block's parameters so far are taken in."""
        self._versions[block.number] = _versions(block)


def _versions(block: Block) -> int:
    """Sum torch's version counters over the parameters: it grows with every write in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(member.param._version for member in block.unit.members)
