"""All-gather buffers for blocks, and gradient buffers, of a sharded model in device memory.

Each rank uploads its shard of a block from host memory, and the devices all-gather the block among
themselves. Of gradients, the devices reduce-scatter the mean, and each rank downloads its shard of
it. The compute stream waits for all of this; the CPU waits only until the work is enqueued on the
device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.core.ticket import Ticket
from offload.device import DeviceBuffer
from offload.distributed.device_network import DeviceNetwork
from offload.params.gathered import Claim, Gathered
from offload.planning.unit import on_device_bytes


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

    def take(self, nbytes: int, what: str) -> Claim:
        with self._lock:
            left = self._left_bytes
            if nbytes <= left:
                self._left_bytes -= nbytes
                return _DeviceClaim(self, nbytes)
        raise CapacityError(
            f"{self.device}: {what} need {format_size(nbytes)} ({nbytes} bytes); beside units that "
            f"are gathered one by one and their gradients {format_size(left)} of device_memory are "
            "left, for activations too; raise device_memory, or use less"
        )

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left_bytes += nbytes

    def poll(self) -> None:
        self._transfer.poll()


class _DeviceClaim:
    def __init__(self, gather_memory: DeviceGatheredBlockMemory, nbytes: int) -> None:
        self._gather_memory, self._nbytes = gather_memory, nbytes

    def release(self) -> None:
        nbytes, self._nbytes = self._nbytes, 0
        self._gather_memory.give_back(nbytes)
