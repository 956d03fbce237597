"""The bytes behind the tensors that autograd has saved, and the tensors as looks at them.

A piece is one storage, however many tensors were saved of it. It is in one stage of the table
below. It belongs to the graph: it ends with the last saved tensor of it, whether backward came or
not, wherever it is by then.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.core.holders import holders
from offload.core.ticket import Ticket


class Stage(Enum):
    """Of a piece."""

    HERE = "here"
    GOING = "going"  # has its memory until it is elsewhere
    AWAY = "away"
    COMING = "coming"


MOVES = {
    Stage.HERE: {Stage.GOING, Stage.AWAY},
    Stage.GOING: {Stage.AWAY, Stage.HERE},
    Stage.AWAY: {Stage.COMING},
    Stage.COMING: {Stage.HERE, Stage.AWAY},
}


class StorageKeeper(Protocol):
    """Who has the pieces."""

    def bring(self, piece: SavedStorage) -> Tensor:
        """The piece's bytes, where they are computed on."""

    def ended(self, piece: SavedStorage) -> None:
        """Nobody wants it any more. Called by finalizers: must not block and must not fail."""


class SavedStorage:
    """The bytes of one storage."""

    def __init__(self, owner: StorageKeeper, number: int, memory: Tensor) -> None:
        self.owner = owner
        self.number = number
        self.nbytes = memory.nbytes
        self.memory: Tensor | None = memory
        self.stage = Stage.HERE
        self.is_outside = False  # these very bytes are there as well
        self.leaving: Ticket[Any] | None = None
        self.outside: Any = None  # what is known of it outside
        self.own_tensors = 1  # on its memory, beside those that were saved
        self.saved: list[weakref.ref[PackedTensor]] = []

    @property
    def name(self) -> str:
        return f"activations {self.number}"

    def move_to(self, stage: Stage) -> None:
        assert stage in MOVES[self.stage], f"{self.name}: {self.stage} -> {stage}"
        self.stage = stage

    def living(self) -> list[PackedTensor]:
        found = [(ref, ref()) for ref in self.saved]
        self.saved = [ref for ref, saved in found if saved is not None]
        return [saved for _, saved in found if saved is not None]

    def is_ours_alone(self) -> bool:
        """Whether nobody else holds its memory."""
        assert self.memory is not None
        own = self.own_tensors + sum(saved.tensor is not None for saved in self.living())
        return holders(self.memory) == own

    def __del__(self) -> None:
        self.memory = None
        self.owner.ended(self)


class PackedTensor:
    """One tensor that autograd has saved: a look at a piece."""

    def __init__(self, piece: SavedStorage, tensor: Tensor) -> None:
        self._piece = piece
        self._look = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        # Without its history, or a node that keeps its own output would keep itself.
        self.tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._spoiled: int | None = None  # the version that it had when it went
        piece.saved.append(weakref.ref(self))

    def _look_at(self, memory: Tensor) -> None:
        dtype, offset, size, stride = self._look
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        self.tensor = empty.set_(memory.untyped_storage(), offset, size, stride)
        self._version = self.tensor._version

    def leave(self) -> None:
        """Keep only what it looks like."""
        assert self.tensor is not None
        if self.tensor._version != self._version:
            self._spoiled = self.tensor._version
        self.tensor = None

    def checked(self) -> Tensor:
        """The tensor again; an error if it was changed since, as without us."""
        if self._spoiled is None:
            memory = self._piece.owner.bring(self._piece)
            if self.tensor is None:
                self._look_at(memory)
        version = self._spoiled if self.tensor is None else self.tensor._version
        if self.tensor is None or version != self._version:
            dtype, _, size, _ = self._look
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {dtype} tensor of shape {size} is at version {version}; "
                f"expected version {self._version} instead"
            )
        return self.tensor
