"""Memory for gathered blocks and whole gradients of a model that is sharded over ranks, and the
collectives that fill and reduce it: `HostGatheredBlockMemory` if the model is computed in host
memory, `DeviceGatheredBlockMemory` (`gathered_device.py`) if it is computed on devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.core.budget import HOST
from offload.core.tensors import holders
from offload.core.ticket import Ticket
from offload.distributed import Ranks


class Claim(Protocol):
    """A claim of bytes beyond those that are always available; `release` returns them."""

    def release(self) -> None: ...


class Gathered(Protocol):
    """A buffer with all bytes of a block, or of its gradients, for a while."""

    taken_bytes: int  # of memory

    @property
    def address(self) -> int:
        """The address at which its memory begins."""

    def arrive(self) -> Ticket[None] | None:
        """Wait until the buffer can be used. Return a ticket that ends when this rank's own shard,
        which it was gathered from, is not read any more; None: it is not read any more already.
        """

    def use(self) -> Tensor:
        """Return the bytes, for the computation that runs now in this thread; after `arrive`. They
        stay as long as the tensor is held.
        """

    def release(self) -> bool:
        """Release the memory. Return False if other code still holds a view, which keeps it."""


class GatheredBlockMemory(Protocol):
    """The memory that gathered buffers are in, and its collectives. Everything but `take` and
    `make` needs all ranks, in the same order.
    """

    device: torch.device

    def gather(self, nbytes: int, own: Tensor, what: str, after: Ticket[Any] | None) -> Gathered:
        """Start the all-gather of `nbytes` from every rank's `own`, which has its values once
        `after` has ended.
        """

    def make(self, nbytes: int, what: str, parts: Sequence[tuple[int, int]]) -> Gathered:
        """Make a buffer to be filled in these parts, `[first, last)` in bytes; the rest is zero."""

    def reduce(self, whole: Gathered, target: Tensor, what: str) -> Ticket[Any]:
        """Start the reduce-scatter of `whole`: `target`, in host memory, becomes this rank's shard
        of the mean over all ranks. The values of `whole` are those of this moment in the order of
        the computation. It is used up, and stays until the ticket ends.
        """

    def take(self, nbytes: int, what: str) -> Claim:
        """Claim more memory than is always available. Raises `CapacityError` with the numbers."""

    def poll(self) -> None:
        """Release host memory that no operation reads any more."""


class HostGathered:
    """A gathered buffer in host memory that torch has allocated."""

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
            self._coming = None  # not before: Ctrl-C may interrupt the wait

    def use(self) -> Tensor:
        assert self.memory is not None
        return self.memory.detach()

    def release(self) -> bool:
        memory, self.memory = self.memory, None
        return memory is None or holders(memory) == 1


class HostGatheredBlockMemory:
    """The all-gather buffers of these ranks in host memory, within its budget."""

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
        """Do nothing: buffers are held here only until their operation is waited for."""
