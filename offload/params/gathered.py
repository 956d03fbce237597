"""Memory for whole blocks and whole gradients of a model that is shared out over ranks, and how
they come there and go: `HostGatherMemory` where the model is computed in host memory,
`DeviceWholes` (`device_wholes.py`) where it is computed on devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.core.budget import HOST
from offload.core.holders import holders
from offload.core.ticket import Ticket
from offload.distributed import Ranks


class Claim(Protocol):
    """Bytes beyond those that are always there; `release` gives them back."""

    def release(self) -> None: ...


class Gathered(Protocol):
    """All bytes of a block, or of its gradients, for a while."""

    taken_bytes: int  # of memory

    @property
    def address(self) -> int:
        """Where its memory begins."""

    def arrive(self) -> Ticket[None] | None:
        """Wait until it can be used. The result ends when this rank's own slice, which it was
        gathered from, is not read any more; None: that is so already.
        """

    def use(self) -> Tensor:
        """The bytes, for whatever computes now in this thread; after `arrive`. They stay as long as
        the tensor is held.
        """

    def release(self) -> bool:
        """Give the memory up. False: somebody still holds a view of it, and keeps it."""


class GatherMemory(Protocol):
    """Where they are. Everything but `take` and `make` needs all ranks, in the same order."""

    device: torch.device

    def gather(self, nbytes: int, own: Tensor, what: str, after: Ticket[Any] | None) -> Gathered:
        """Start to fill so many bytes with everybody's `own`, which has its values once `after` has
        ended.
        """

    def make(self, nbytes: int, what: str, parts: Sequence[tuple[int, int]]) -> Gathered:
        """Memory to be filled in these parts, first and last (excluded) byte; the rest is zero."""

    def reduce(self, whole: Gathered, target: Tensor, what: str) -> Ticket[Any]:
        """Make `target`, in host memory, this rank's slice of the mean over all ranks. `whole`, as
        it is now in the order of what computes, is used up; it stays until the end.
        """

    def take(self, nbytes: int, what: str) -> Claim:
        """More memory than is always there, or `CapacityError` with the numbers."""

    def poll(self) -> None:
        """Let go of host memory that nothing reads any more."""


class HostGathered:
    """In memory of torch's."""

    def __init__(self, memory: Tensor, coming: Ticket[None] | None = None) -> None:
        self.memory: Tensor | None = memory
        self.taken_bytes = memory.nbytes
        self._coming = coming

    @property
    def address(self) -> int:
        assert self.memory is not None
        return self.memory.data_ptr()

    def arrive(self) -> None:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None  # not before: somebody may press Ctrl-C

    def use(self) -> Tensor:
        assert self.memory is not None
        return self.memory.detach()

    def release(self) -> bool:
        memory, self.memory = self.memory, None
        return memory is None or holders(memory) == 1


class HostGatherMemory:
    """Of these ranks, within the budget of host memory."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def gather(self, nbytes: int, own: Tensor, what: str, after: Ticket[Any] | None) -> Gathered:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return HostGathered(
            memory, self._ranks.gather(memory, own, what, after) if nbytes else None
        )

    def make(self, nbytes: int, what: str, parts: Sequence[tuple[int, int]]) -> Gathered:
        memory, end = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), 0
        for first, last in (*parts, (nbytes, nbytes)):
            memory[end:first].zero_()
            end = last
        return HostGathered(memory)

    def reduce(self, whole: Gathered, target: Tensor, what: str) -> Ticket[Any]:
        return self._ranks.reduce_scatter(target, whole.use().view(target.dtype), what)

    def take(self, nbytes: int, what: str) -> Claim:
        return HOST.take(nbytes, what)

    def poll(self) -> None:
        """Nothing is held here longer than somebody waits for it."""
