"""A device in virtual time: it computes in order, and has a queue of copies each way.

The thread that trains submits work and goes on; it waits only for what it needs in host memory.
Memory is allocated and freed in the order of that thread, as torch's allocator does; an upload into
it waits until the device has ended the work that used it before.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.core.metrics import Metrics
from offload.device.accelerator import DeviceReading
from offload.optim.staging import DeviceStaging, StagingBuffer
from offload.planning.layout import Chunk
from offload.planning.profile import Profile
from offload.planning.state_plan import Plan
from offload.planning.unit import on_device_bytes
from offload.tools.forecast.simulation.clock import Clock

COMPUTING = "device"  # the thread waits until the device has computed
DEVICE_COPY = "device copy"
_ADDRESSES = count(1)


class VirtualCopyTicket:
    """A ticket of a copy, whose end is known."""

    def __init__(self, clock: Clock, end_s: float) -> None:
        self._clock = clock
        self.end_s = end_s

    @property
    def done(self) -> bool:
        return self.end_s <= self._clock.now_s

    def wait(self) -> None:
        with self._clock.cause(DEVICE_COPY):
            self._clock.wait_until(self.end_s)


class VirtualDevice:
    """A device in virtual time: its memory, and copies as fast as a machine's. A residency uses it
    as its transfer. name: for messages. waiting_bytes: if downloads of more bytes are in flight,
    the next computation waits for the oldest of them.
    """

    def __init__(
        self, clock: Clock, machine: Profile, metrics: Metrics, name: str, waiting_bytes: int = 0
    ) -> None:
        up, down = machine.to_device_bytes_per_s, machine.to_host_bytes_per_s
        if not up or not down:
            raise ConfigError(
                f"profile {machine.name}: expected to_device_bytes_per_s and to_host_bytes_per_s "
                "for a model that runs on a device; `offload bench` measures them where there is "
                "one"
            )
        self.clock = clock
        self.device = _called(name)
        self.memory = VirtualDeviceMemory()
        self.busy_s = self.up_s = self.down_s = 0.0  # of computing, of copies
        self.computed_until_s = self.uploaded_until_s = 0.0
        self._up_bytes_per_s, self._down_bytes_per_s, self._metrics = up, down, metrics
        self._waiting_bytes = waiting_bytes
        self._downloaded_until_s = 0.0
        self._next_s = 0.0  # what the next computation waits for
        self._lowering: deque[tuple[float, int]] = deque()  # ends and bytes of downloads

    def compute(self, seconds: float) -> None:
        """Submit a computation, which begins after those before it and after the copies that it
        needs.
        """
        begin_s = max(self.clock.now_s, self.computed_until_s, self._next_s)
        self.computed_until_s = begin_s + seconds
        self.busy_s += seconds

    def need(self, moment_s: float) -> None:
        """Make the next computation begin no earlier than at this moment."""
        self._next_s = max(self._next_s, moment_s)

    def upload(self, nbytes: int) -> VirtualCopyTicket:
        """Submit a copy to the device, after those before it."""
        self._metrics.count("host_to_device_bytes", nbytes)
        seconds = nbytes / self._up_bytes_per_s
        self.up_s += seconds
        self.uploaded_until_s = max(self.clock.now_s, self.uploaded_until_s) + seconds
        return VirtualCopyTicket(self.clock, self.uploaded_until_s)

    def hold_copies(self) -> None:
        """Make later uploads wait for the computations submitted so far: these still use memory
        that is free now.
        """
        self.uploaded_until_s = max(self.uploaded_until_s, self.computed_until_s)

    def download(self, nbytes: int) -> VirtualCopyTicket:
        """Submit a copy to the host of what is computed now."""
        self._metrics.count("device_to_host_bytes", nbytes)
        seconds = nbytes / self._down_bytes_per_s
        self.down_s += seconds
        begin_s = max(self.clock.now_s, self._downloaded_until_s, self.computed_until_s)
        self._downloaded_until_s = begin_s + seconds
        self._lowering.append((self._downloaded_until_s, nbytes))
        while sum(n for _, n in self._lowering) > self._waiting_bytes and len(self._lowering) > 1:
            self.need(self._lowering.popleft()[0])
        return VirtualCopyTicket(self.clock, self._downloaded_until_s)

    def settle(self) -> None:
        """Wait until everything is computed and all downloads have ended."""
        self._lowering.clear()
        with self.clock.cause(COMPUTING):
            self.clock.wait_until(self.computed_until_s)
        with self.clock.cause(DEVICE_COPY):
            self.clock.wait_until(self._downloaded_until_s)

    def poll(self) -> None:
        """Do nothing: tickets end by themselves here."""

    def allocate(self, nbytes: int, what: str = "a block", is_urgent: bool = True) -> VirtualBuffer:
        return VirtualBuffer(self, nbytes)


class VirtualDeviceMemory:
    """The memory of a virtual device: the bytes in use by blocks, and by activations and logits. It
    is its own gauge, and reads them as a device's gauge reads the allocator.
    """

    device = torch.device("meta", 0)

    def __init__(self) -> None:
        self.used_bytes = 0  # by blocks
        self.peak_bytes = self.ever_bytes = 0  # of both
        self.kept_bytes = 0  # by activations and logits

    def take(self, nbytes: int, by_others: bool = False) -> None:
        if by_others:
            self.kept_bytes += nbytes
        else:
            self.used_bytes += nbytes
        self.ever_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + self.kept_bytes)

    def give_back(self, nbytes: int, by_others: bool = False) -> None:
        if by_others:
            self.kept_bytes = max(0, self.kept_bytes - nbytes)
        else:
            self.used_bytes -= nbytes

    def read(self) -> DeviceReading:
        return DeviceReading(self.used_bytes + self.kept_bytes, self.peak_bytes, self.ever_bytes)

    def others_bytes(self, reading: DeviceReading) -> int:
        return max(0, reading.now - self.used_bytes)


class VirtualBuffer:
    """The device memory of one block."""

    views = 0  # that other code holds

    def __init__(self, device: VirtualDevice, nbytes: int) -> None:
        self.address = next(_ADDRESSES)
        self._device = device
        self._nbytes = on_device_bytes(nbytes)
        self._filled_s = 0.0
        device.memory.take(self._nbytes)

    def fill(self, host: Tensor) -> VirtualCopyTicket:
        moment = self._device.upload(host.nbytes)
        self._filled_s = moment.end_s
        return moment

    def use(self) -> Any:
        self._device.need(self._filled_s)
        return torch.empty(0, device="meta")

    def release(self) -> bool:
        self._device.hold_copies()
        self._device.memory.give_back(self._nbytes)
        return True


def _called(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:  # a kind that this torch does not know
        return torch.device("meta")


class VirtualStaging(DeviceStaging):
    """The staging buffers of a wrapped optimizer, on which only the copies take time. The memory of
    one that is taken is as large as the chunk's parameters on the device.
    """

    def __init__(self, device: VirtualDevice, plan: Plan) -> None:
        nothing = torch.empty(0, device="meta")
        super().__init__((), [nothing] * plan.staging_buffers, {}, plan.has_grad_buffers)
        self._device, self._specs = device, plan.params

    def end_step(self) -> None:
        """Make the next computation wait for the new parameters."""
        self._device.need(self._device.uploaded_until_s)
        while self._away:
            self._clear_oldest()

    def needs(self, chunk: Chunk) -> bool:
        return self._bytes_of(chunk) > 0

    def take(self, chunk: Chunk) -> StagingBuffer:
        staging_buffer, nbytes = self.borrow(), self._bytes_of(chunk)
        staging_buffer.memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        coming = self._device.download(nbytes if self._has_no_grads else 2 * nbytes)
        staging_buffer.tickets.append(coming)
        return staging_buffer

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        staging_buffer.tickets.append(self._device.upload(staging_buffer.memory.nbytes))
        self._away.append(staging_buffer)

    def _bytes_of(self, chunk: Chunk) -> int:
        """Return the bytes of the chunk's parameters on the device."""
        widths = ((p.end - p.begin) * self._specs[p.param].device_bytes for p in chunk.slices)
        return sum(widths)
