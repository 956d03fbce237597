"""The way of device parameters and gradients to the host and back, slice by slice.

The kernels run on the host. For a chunk whose parameters are on a device, the slices of parameters
and gradients are copied to a staging buffer: a piece of host memory for one chunk. There they are
updated, and the parameters go back. There are a few staging buffers, so that the copies of the next
chunks run while one is worked on. The parameter is read from the device each time, so whatever
somebody has put into it counts. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from offload.core.ticket import Ticket
from offload.device import DeviceTransfer, Mark
from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.optim.spilled_gradient import Gradient, in_memory
from offload.planning.layout import Chunk, Slice
from offload.planning.planner import staging_spans


class Awaited(Protocol):
    """Something under way: a ticket, say."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass
class StagingBuffer:
    """Host memory for the slices of one chunk: parameter and gradient of each."""

    memory: Tensor  # bytes
    slices: dict[Slice, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tickets: list[Awaited] = field(default_factory=list)


class Arriving(Protocol):
    """A gradient that is in host memory, or comes there by itself."""

    memory: Tensor

    def take_ticket(self) -> list[Ticket[Tensor]]:
        """What has to be waited for before `memory` is used; once."""


class StagingProvider(Protocol):
    """Where the update finds parameters and gradients that are not simply in host memory."""

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, Arriving]
    ) -> None: ...

    def end_step(self) -> None: ...

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        """The order in which these chunks, all of the step, are best taken. at_hand: numbers of
        those whose state is in a buffer; they come first.
        """

    def needs(self, chunk: Chunk) -> bool:
        """Whether the update of a chunk needs a staging buffer."""

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        """Whether `take` is possible now or, if it may wait, at all."""

    def take(self, chunk: Chunk) -> StagingBuffer:
        """A staging buffer with the chunk's slices on their way to it."""

    def values(self, part: Slice) -> Tensor:
        """Of a parameter's slice, now."""

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        """What is on the staging buffer has changed. It comes back by itself."""

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        """Nothing on it has changed."""

    def break_off(self) -> None:
        """The step has failed; whatever was taken for it is not needed any more."""

    def close(self) -> None: ...


class DeviceStaging:
    """All staging buffers of one optimizer, and the transfers to its devices."""

    def __init__(
        self,
        records: Sequence[Record],
        memory: Sequence[Tensor],
        transfers: Mapping[torch.device, DeviceTransfer],
        has_no_grads: bool,
    ) -> None:
        self._records = records
        self._free = [StagingBuffer(one) for one in memory]
        self._away: deque[StagingBuffer] = deque()  # their parameters are on the way to the device
        self._transfers = transfers
        self._marks: dict[torch.device, Mark] = {}
        self._has_no_grads = has_no_grads  # gradients have host memory of their own
        self._grads: Mapping[int, Tensor] = {}
        self._grad_buffers: Mapping[int, Arriving] = {}

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, Arriving]
    ) -> None:
        """Remember where each device is: what it was given before is done with the parameters.
        homes: gradients that need no staging buffer.
        """
        self._grads, self._grad_buffers = in_memory(grads), grad_buffers
        self._marks = {device: t.mark() for device, t in self._transfers.items()}

    def end_step(self) -> None:
        """What devices are given from now on comes after the new parameters."""
        for transfer in self._transfers.values():
            transfer.join()
        self._grads, self._grad_buffers = {}, {}  # gradients belong to the parameters

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        return chunks

    def needs(self, chunk: Chunk) -> bool:
        return bool(self._transfers) and any(self._is_moved(part) for part in chunk.slices)

    def _is_moved(self, part: Slice) -> bool:
        return part.param in self._grads and not self._records[part.param].local.is_cpu

    @property
    def has_free(self) -> bool:
        """Whether `take` need not wait."""
        while self._away and all(ticket.done for ticket in self._away[0].tickets):
            self._clear_oldest()
        return bool(self._free)

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        """Whether `take` is possible: a staging buffer is free or, if it may wait, will be."""
        return self.has_free or (may_wait and bool(self._away))

    def _clear_oldest(self) -> None:
        staging_buffer = self._away.popleft()
        for ticket in staging_buffer.tickets:
            ticket.wait()
        self.give_back(staging_buffer)

    def borrow(self) -> StagingBuffer:
        """An empty staging buffer; waits for one if it must."""
        if not self.has_free:
            self._clear_oldest()
        return self._free.pop()

    def take(self, chunk: Chunk) -> StagingBuffer:
        """A staging buffer with the chunk's slices on their way to it; waits for one if it must."""
        staging_buffer = self.borrow()
        spans = staging_spans(chunk, self._widths(), self._has_no_grads)
        for part, (begin, middle, end) in spans.items():
            if self._is_moved(part):
                param = self._param(part)
                here = self._download(
                    staging_buffer, part, param, staging_buffer.memory[begin:middle]
                )
                staging_buffer.slices[part] = (
                    here,
                    self._gradient(staging_buffer, part, staging_buffer.memory[middle:end]),
                )
        return staging_buffer

    def _download(
        self, staging_buffer: StagingBuffer, part: Slice, source: Tensor, memory: Tensor
    ) -> Tensor:
        """Start the copy of a slice from its device to a place on the staging buffer."""
        here = memory.view(source.dtype)[: source.numel()]
        transfer, mark = self._transfers[source.device], self._marks[source.device]
        staging_buffer.tickets.append(
            transfer.read(source, here, self._records[part.param].name, mark)
        )
        return here

    def _gradient(self, staging_buffer: StagingBuffer, part: Slice, memory: Tensor) -> Tensor:
        buffer, grad = self._grad_buffers.get(part.param), self._grads[part.param]
        if buffer is None and grad.is_cpu:  # averaged over ranks: of our own elements only
            first, _ = self._records[part.param].own or (0, 0)
            return grad[part.begin - first : part.end - first]
        if buffer is None:
            return self._download(staging_buffer, part, grad[part.begin : part.end], memory)
        # Chunks are worked on in the order in which they are taken: the first one's wait is enough.
        staging_buffer.tickets += buffer.take_ticket()
        return buffer.memory[part.begin : part.end]

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        """Start the way of the updated parameters to the device. The staging buffer comes back by
        itself.
        """
        for part, (host, _) in staging_buffer.slices.items():
            param = self._param(part)
            transfer, mark = self._transfers[param.device], self._marks[param.device]
            name = self._records[part.param].name
            staging_buffer.tickets.append(transfer.write(host, param, mark, name))
        self._away.append(staging_buffer)

    def values(self, part: Slice) -> Tensor:
        return self._param(part)

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        staging_buffer.slices, staging_buffer.tickets = {}, []
        self._free.append(staging_buffer)

    def break_off(self) -> None:
        """Nothing: staging buffers come back by themselves."""

    def _param(self, part: Slice) -> Tensor:
        return flat(self._records[part.param].local)[part.begin : part.end]

    def _widths(self) -> list[int]:
        return [record.device_bytes for record in self._records]

    def close(self) -> None:
        for transfer in self._transfers.values():
            transfer.close()
