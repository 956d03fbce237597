"""The staging of device parameters and gradients for the update, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from offload.optim.gradient_source import Gradient
from offload.optim.staging import HostSum, StagingBuffer
from offload.planning.layout import Chunk, Slice
from offload.planning.state_plan import Plan
from offload.tools.forecast.simulation.device import VirtualCopyTicket, VirtualDevice


class VirtualStaging:
    """The staging buffers of a wrapped optimizer."""

    def __init__(self, device: VirtualDevice, plan: Plan) -> None:
        self._device, self._specs, self._free = device, plan.params, plan.staging_buffers
        self._has_grad_buffers = plan.has_grad_buffers  # downloaded before the step
        self._away: deque[VirtualCopyTicket] = (
            deque()
        )  # uploads in flight, each of one staging buffer
        self._nbytes: dict[int, int] = {}  # of parameters, by staging buffer

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, HostSum]
    ) -> None:
        """Do nothing: the gradients are computed."""

    def end_step(self) -> None:
        """Make the next computation wait for the new parameters."""
        while self._away:
            self._device.need(self._away[-1].end_s)
            self._clear_oldest()

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        return chunks

    def needs(self, chunk: Chunk) -> bool:
        return self._bytes_of(chunk) > 0

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        while self._away and self._away[0].done:
            self._clear_oldest()
        return self._free > 0 or (may_wait and bool(self._away))

    def take(self, chunk: Chunk) -> StagingBuffer:
        if not self.has_place(chunk, may_wait=False):
            self._clear_oldest()
        self._free -= 1
        nbytes = self._bytes_of(chunk)
        coming = self._device.download(nbytes if self._has_grad_buffers else 2 * nbytes)
        staging_buffer = StagingBuffer(torch.empty(0, device="meta"), tickets=[coming])
        self._nbytes[id(staging_buffer)] = nbytes
        return staging_buffer

    def values(self, part: Slice) -> Tensor:
        raise AssertionError("no state is loaded here")

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        self._away.append(self._device.upload(self._nbytes.pop(id(staging_buffer))))

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        self._nbytes.pop(id(staging_buffer))
        self._free += 1

    def break_off(self) -> None:
        """Do nothing: staging buffers free themselves."""

    def _clear_oldest(self) -> None:
        self._away.popleft().wait()
        self._free += 1

    def _bytes_of(self, chunk: Chunk) -> int:
        """Return the bytes of the chunk's parameters on the device."""
        widths = ((p.end - p.begin) * self._specs[p.param].device_bytes for p in chunk.slices)
        return sum(widths)
