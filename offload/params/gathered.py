"""Memory for gathered blocks and whole gradients of a model that is sharded over ranks, and the
collectives that fill and reduce it: `HostGatheredBlockMemory` if the model is computed in host
memory, `DeviceGatheredBlockMemory` if it is computed on devices.

There each rank uploads its shard of a block from host memory, and the devices all-gather the block
among themselves. Of gradients, the devices reduce-scatter the mean, and each rank downloads its
shard of it. The compute stream waits for all of this; the CPU waits only until the work is enqueued
on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.core.budget import HOST
from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.core.tensors import holders
from offload.core.ticket import Ticket
from offload.device.buffer import DeviceBuffer
from offload.distributed.device_network import DeviceNetwork
from offload.distributed.ranks import Ranks
from offload.planning.unit import on_device_bytes

Release = Callable[[], None]  # returns bytes that were claimed; called once


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

    def take(self, nbytes: int, what: str) -> Release:
        """Claim more memory than is always available; return what releases the claim. Raises
        `CapacityError` with the numbers.
        """

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

    def take(self, nbytes: int, what: str) -> Release:
        return HOST.take(nbytes, what).release

    def poll(self) -> None:
        """Do nothing: buffers are held here only until their operation is waited for."""


class DeviceGathered:
    """An all-gather buffer, or a gradient buffer, in device memory.

    coming: ends when the all-gather is enqueued on the device; its result is a ticket that ends
    when this rank's shard is uploaded.
    """

    def __init__(self, buffer: DeviceBuffer, coming: Ticket[Ticket[None]] | None = None) -> None:
        self.buffer = buffer
        self.taken_bytes = on_device_bytes(buffer.nbytes)
        self._coming = coming

    @property
    def address(self) -> int:
        return self.buffer.address

    def arrive(self) -> Ticket[None] | None:
        ticket = self._coming
        upload = None if ticket is None else ticket.wait()
        self._coming = None  # not before: a Ctrl-C may interrupt the wait
        return upload

    def use(self) -> Tensor:
        return self.buffer.use()

    def release(self) -> bool:
        return self.buffer.release()


class DeviceGatheredBlockMemory:
    """The gathered blocks and gradients of a network's ranks in device memory.

    left_bytes: device memory that is reserved for nothing else.
    """

    def __init__(self, network: DeviceNetwork, left_bytes: int) -> None:
        self.device = network.transfer.device
        self._network, self._transfer = network, network.transfer
        self._left_bytes = left_bytes
        self._lock = threading.Lock()

    def gather(self, nbytes: int, own: Tensor, what: str, after: Ticket[Any] | None) -> Gathered:
        buffer = self._transfer.allocate(nbytes, what)
        return DeviceGathered(
            buffer, self._network.gather(buffer, own, what, after) if nbytes else None
        )

    def make(self, nbytes: int, what: str, parts: Sequence[tuple[int, int]]) -> Gathered:
        buffer = self._transfer.allocate(nbytes, what)
        buffer.use().zero_()  # the whole buffer: one kernel is cheaper than one for every gap
        buffer.note_fill()  # gradients may come from several streams
        return DeviceGathered(buffer)

    def reduce(self, whole: Gathered, target: Tensor, what: str) -> Ticket[Any]:
        assert isinstance(whole, DeviceGathered), what
        if not target.numel():
            return Ticket.of(target)
        return self._network.reduce_scatter(whole.buffer, target.dtype, target, what)

    def take(self, nbytes: int, what: str) -> Release:
        with self._lock:
            left = self._left_bytes
            if nbytes <= left:
                self._left_bytes -= nbytes
                return partial(self._give_back, nbytes)
        raise CapacityError(
            f"{self.device}: {what} need {format_size(nbytes)} ({nbytes} bytes); beside units that "
            f"are gathered one by one and their gradients {format_size(left)} of device_memory are "
            "left, for activations too; raise device_memory, or use less"
        )

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left_bytes += nbytes

    def poll(self) -> None:
        self._transfer.poll()
