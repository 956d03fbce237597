"""Copies of blocks to compute with, and who sees them: the parameters lie in a copy while it is in
use, and are guarded while it is not. Where a copy's bytes are and how they come is the business of
whoever makes one (`device_tier.py`, `gathered_tier.py`).
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
    """Of one model's blocks, on one device. take_back: is called with a block whose parameters were
    changed, before they are seen no more. lock: whoever calls has it.
    """

    def __init__(
        self,
        device: torch.device,
        owner: Owner,
        take_back: Callable[[Block], None],
        lock: threading.RLock,
    ) -> None:
        self.kept: set[int] = set()  # blocks that stay while they are good
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
        """The copy's bytes, to compute with now; they stay as long as the tensor is held."""

    @abstractmethod
    def address_of(self, block: Block) -> int:
        """Where the copy begins."""

    def block_of(self, tensor: Tensor) -> Block | None:
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def is_in_place(self, block: Block) -> bool:
        """Whether all its parameters still lie where they were attached."""
        return not block.strangers(self.address_of(block))

    def attach(self, block: Block) -> None:
        """Let the parameters be seen with their values, by what computes now."""
        memory = self.memory_of(block)
        if not block.is_attached:
            for member, values in block.views(memory):
                restore(member.param, values)
            self.note_seen(block)
            block.is_attached = True

    def detach(self, block: Block) -> None:
        """Let the parameters be seen no more; the bytes stay where they are."""
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
        """What was done to its parameters so far is known."""
        self._versions[block.number] = _versions(block)


def _versions(block: Block) -> int:
    """Grows whenever somebody writes to a parameter in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(member.param._version for member in block.unit.members)
