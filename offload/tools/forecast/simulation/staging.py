"""The staging of device parameters and gradients for the update, in virtual time."""

from __future__ import annotations

import torch

from offload.optim.staging import DeviceStaging, StagingBuffer
from offload.planning.layout import Chunk
from offload.planning.state_plan import Plan
from offload.tools.forecast.simulation.device import VirtualDevice


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
