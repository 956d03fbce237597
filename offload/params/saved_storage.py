"""The storages behind the tensors that autograd has saved, and the tensors as views of them.

A `SavedStorage` is one storage, however many tensors autograd saved of it. It is in one stage of
the table below. The autograd graph owns it: it ends with the last saved tensor that views it,
whether backward ran or not, in any stage.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.core.holders import holders
from offload.core.ticket import Ticket


class Stage(Enum):
    """The stage of a saved storage on its way to the activation store and back."""

    HERE = "here"
    GOING = "going"  # the write is in flight; it keeps its memory until then
    AWAY = "away"
    COMING = "coming"


MOVES = {
    Stage.HERE: {Stage.GOING, Stage.AWAY},
    Stage.GOING: {Stage.AWAY, Stage.HERE},
    Stage.AWAY: {Stage.COMING},
    Stage.COMING: {Stage.HERE, Stage.AWAY},
}


class StorageKeeper(Protocol):
    """The owner of saved storages, which offloads and fetches them."""

    def bring(self, piece: SavedStorage) -> Tensor:
        """Fetch the storage if need be; return its bytes in the memory the model computes in."""

    def ended(self, piece: SavedStorage) -> None:
        """Note that no saved tensor refers to the storage any more. Finalizers call it: it must not
        block and must not fail.
        """


class SavedStorage:
    """A storage of which autograd has saved one or more tensors."""

    def __init__(self, owner: StorageKeeper, number: int, memory: Tensor) -> None:
        self.owner = owner
        self.number = number
        self.nbytes = memory.nbytes
        self.memory: Tensor | None = memory
        self.stage = Stage.HERE
        self.is_outside = False  # the activation store has these very bytes, too
        self.leaving: Ticket[Any] | None = None  # the write in flight
        self.outside: Any = None  # for the activation store
        self.own_tensors = 1  # the engine's own views of its memory, beside the saved tensors
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
        """Return whether only the engine and the saved tensors hold the memory."""
        assert self.memory is not None
        own = self.own_tensors + sum(saved.tensor is not None for saved in self.living())
        return holders(self.memory) == own

    def __del__(self) -> None:
        self.memory = None
        self.owner.ended(self)


@dataclass(frozen=True)
class KeptTensor:
    """A saved tensor that stays in memory. It is detached, since a node that keeps its own output
    would keep itself. With hooks in force torch leaves the check of the version to them.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> KeptTensor:
        return cls(tensor.detach(), tensor._version)

    def checked(self) -> Tensor:
        if self.tensor._version != self.version:
            size, now = tuple(self.tensor.shape), self.tensor._version
            raise _modified(self.tensor.dtype, size, now, self.version)
        return self.tensor


class PackedTensor:
    """A tensor that autograd has saved: a view of a saved storage."""

    def __init__(self, piece: SavedStorage, tensor: Tensor) -> None:
        self._piece = piece
        self._look = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        # Detached: a node that saves its own output would keep itself alive in a reference cycle.
        self.tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._spoiled: int | None = None  # its version at eviction, if it was changed before
        piece.saved.append(weakref.ref(self))

    def _look_at(self, memory: Tensor) -> None:
        dtype, offset, size, stride = self._look
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        self.tensor = empty.set_(memory.untyped_storage(), offset, size, stride)
        self._version = self.tensor._version

    def leave(self) -> None:
        """Release the tensor; keep its type, offset, shape and stride."""
        assert self.tensor is not None
        if self.tensor._version != self._version:
            self._spoiled = self.tensor._version
        self.tensor = None

    def checked(self) -> Tensor:
        """Return the tensor, fetched if need be. Raises `RuntimeError` as autograd does if it was
        changed in place since it was saved.
        """
        if self._spoiled is None:
            memory = self._piece.owner.bring(self._piece)
            if self.tensor is None:
                self._look_at(memory)
        version = self._spoiled if self.tensor is None else self.tensor._version
        if self.tensor is None or version != self._version:
            dtype, _, size, _ = self._look
            raise _modified(dtype, size, version, self._version)
        return self.tensor


def _modified(
    dtype: torch.dtype, size: tuple[int, ...], version: int | None, expected: int
) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {dtype} tensor of shape {size} is at version {version}; expected version "
        f"{expected} instead"
    )
