"""The staging of device parameters and gradients: slice by slice to the host and back.

The kernels run on the host. For a chunk whose parameters are on a device, the slices of parameters
and gradients are downloaded to a staging buffer, which holds one chunk's slices in host memory.
There they are updated, and the parameters are uploaded. There are a few staging buffers, so that
the copies of the next chunks run while one chunk is updated. The parameter is read from the device
each time, so a change by the user's code counts. One thread at a time.

A gradient that is to be added to one in host memory is downloaded to staging buffers, too, part by
part, and added on the host, in the order of arrival and in the gradient's own dtype: the result has
the bits of torch's own sum on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from offload.core.in_flight import InFlight
from offload.core.locks import uninterrupted
from offload.core.tensors import flat
from offload.core.ticket import Ticket, TicketState
from offload.device.device import DeviceTransfer, Mark
from offload.optim.gradient_source import Gradient, in_memory
from offload.optim.recipe import Record
from offload.planning.layout import Chunk, Slice
from offload.planning.state_plan import staging_spans

# Begins the download of a flat tensor on a device to host memory.
Download = Callable[[Tensor, Tensor], Ticket[Tensor]]
# Takes in values from an element of a flat gradient on: most often adds them.
TakeIn = Callable[[Tensor, int], object]


class Awaited(Protocol):
    """An asynchronous act that can be polled and waited for, such as a ticket."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass
class StagingBuffer:
    """A buffer in host memory for the slices of one chunk: parameter and gradient of each."""

    memory: Tensor  # bytes
    slices: dict[Slice, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tickets: list[Awaited] = field(default_factory=list)


@dataclass(eq=False)
class HostSum:
    """A flat gradient in host memory. ticket: of the download that fills it, until that is waited
    for.
    """

    memory: Tensor
    ticket: Ticket[Tensor] | None = None

    def take_ticket(self) -> list[Ticket[Tensor]]:
        """Return the tickets to wait for before `memory` is used, and forget them."""
        taken, self.ticket = self.ticket, None
        return [] if taken is None else [taken]

    @uninterrupted  # but for its wait, after which the download is still in flight
    def settle(self) -> None:
        """Wait until the gradient has come."""
        ticket = self.ticket
        if ticket is None:
            return
        try:
            ticket.wait()
        except BaseException:
            if ticket.state is TicketState.COLLECTED:  # it has failed
                self.ticket = None
            raise
        self.ticket = None

    def add(self, values: Tensor, begin: int) -> None:
        self.settle()
        with torch.no_grad():
            self.memory[begin : begin + values.numel()].add_(values)


class StagingProvider(Protocol):
    """The provider of parameters and gradients that the update cannot use in place."""

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, HostSum]
    ) -> None: ...

    def end_step(self) -> None: ...

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        """Return the best order for these chunks, which are all of the step. at_hand: numbers of
        the chunks whose state is in a buffer; they come first.
        """

    def needs(self, chunk: Chunk) -> bool:
        """Return whether the update of a chunk needs a staging buffer."""

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        """Return whether `take` is possible now or, if it may wait, at all."""

    def take(self, chunk: Chunk) -> StagingBuffer:
        """Take a staging buffer and start the copies of the chunk's slices into it."""

    def values(self, part: Slice) -> Tensor:
        """Return the present values of a parameter's slice."""

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        """Write back the changed values of the staging buffer, which frees itself when that has
        ended.
        """

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        """Free the staging buffer; nothing in it has changed."""

    def break_off(self) -> None:
        """Release what was taken for the step, which has failed."""


class DeviceStaging:
    """The staging buffers of one optimizer, and the transfers to its devices."""

    def __init__(
        self,
        records: Sequence[Record],
        memory: Sequence[Tensor],
        transfers: Mapping[torch.device, DeviceTransfer],
        has_no_grads: bool,
    ) -> None:
        self._records = records
        self._free = [StagingBuffer(one) for one in memory]
        self.buffer_bytes = max((one.nbytes for one in memory), default=0)
        self._away: deque[StagingBuffer] = deque()  # whose uploads are in flight
        self._transfers = transfers
        self._marks: dict[torch.device, Mark] = {}
        self._has_no_grads = has_no_grads  # gradients have host memory of their own
        self._grads: Mapping[int, Tensor] = {}
        self._grad_buffers: Mapping[int, HostSum] = {}

    def begin_step(
        self, grads: Mapping[int, Gradient], grad_buffers: Mapping[int, HostSum]
    ) -> None:
        """Mark the present position of each device's stream: copies wait for the work submitted
        before, which may use the parameters. grad_buffers: gradients that need no staging buffer.
        """
        self._grads, self._grad_buffers = in_memory(grads), grad_buffers
        self._marks = {device: t.mark() for device, t in self._transfers.items()}

    def end_step(self) -> None:
        """Make the work that devices get from now on wait for the new parameters."""
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
        """Return whether `take` is possible: a buffer is free or, if it may wait, will be."""
        return self.has_free or (may_wait and bool(self._away))

    def _clear_oldest(self) -> None:
        staging_buffer = self._away.popleft()
        for ticket in staging_buffer.tickets:
            ticket.wait()
        self.give_back(staging_buffer)

    def borrow(self) -> StagingBuffer:
        """Take an empty staging buffer; wait for one if necessary."""
        if not self.has_free:
            self._clear_oldest()
        return self._free.pop()

    def take(self, chunk: Chunk) -> StagingBuffer:
        """Take a staging buffer and start the copies of the chunk's slices into it; wait for one if
        necessary.
        """
        staging_buffer = self.borrow()
        widths = [record.device_bytes for record in self._records]
        spans = staging_spans(chunk, widths, self._has_no_grads)
        for part, (begin, middle, end) in spans.items():
            if self._is_moved(part):
                param = self.values(part)
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
        """Start the download of a slice to its place in the staging buffer."""
        here = memory.view(source.dtype)[: source.numel()]
        transfer, mark = self._transfers[source.device], self._marks[source.device]
        staging_buffer.tickets.append(
            transfer.read(source, here, self._records[part.param].name, mark)
        )
        return here

    def _gradient(self, staging_buffer: StagingBuffer, part: Slice, memory: Tensor) -> Tensor:
        buffer, grad = self._grad_buffers.get(part.param), self._grads[part.param]
        if buffer is None and grad.is_cpu:  # averaged over ranks: of this rank's elements
            first, _ = self._records[part.param].own or (0, 0)
            return grad[part.begin - first : part.end - first]
        if buffer is None:
            return self._download(staging_buffer, part, grad[part.begin : part.end], memory)
        # Chunks are updated in the order in which they are taken: the first one's wait is enough.
        staging_buffer.tickets += buffer.take_ticket()
        return buffer.memory[part.begin : part.end]

    def send_back(self, staging_buffer: StagingBuffer) -> None:
        """Start the upload of the updated parameters. The staging buffer is free when that has
        ended.
        """
        for part, (host, _) in staging_buffer.slices.items():
            param = self.values(part)
            transfer, mark = self._transfers[param.device], self._marks[param.device]
            name = self._records[part.param].name
            staging_buffer.tickets.append(transfer.write(host, param, mark, name))
        self._away.append(staging_buffer)

    def values(self, part: Slice) -> Tensor:
        return flat(self._records[part.param].local)[part.begin : part.end]

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        staging_buffer.slices, staging_buffer.tickets = {}, []
        self._free.append(staging_buffer)

    def break_off(self) -> None:
        self._grads, self._grad_buffers = {}, {}  # staging buffers free themselves


NO_STAGING = DeviceStaging((), (), {}, False)  # of a pass that needs no parameters or gradients


class StagedSums:
    """What is on its way to be added to gradients in host memory.

    borrow: takes a staging buffer, of which `most` are in use at a time. give_back: returns it.
    """

    def __init__(
        self,
        borrow: Callable[[], StagingBuffer],
        give_back: Callable[[StagingBuffer], None],
        most: int,
    ) -> None:
        self._borrow, self._give_back, self._most = borrow, give_back, most
        self._coming: InFlight[object] = InFlight(frees_failed=True)
        self.finish = self._coming.finish
        self.finish_what_has_ended = self._coming.finish_what_has_ended

    def add(
        self,
        take_in: TakeIn,
        source: Tensor,
        parts: Iterable[tuple[int, int]],
        download: Download,
        whose: object,
    ) -> None:
        """Begin to download a flat gradient, in these parts [begin, end), each of which fits a
        staging buffer, and to add it by `take_in`.
        """
        for begin, end in parts:
            while len(self._coming) >= self._most:
                self._coming.finish_oldest()
            buffer = self._borrow()
            values = buffer.memory.view(source.dtype)[: end - begin]
            try:
                ticket = download(source[begin:end], values)
            except BaseException:
                self._give_back(buffer)
                raise
            add = partial(take_in, values, begin)
            self._coming.add(ticket, add, partial(self._give_back, buffer), whose)

    def finish_those_of(self, whose: object) -> None:
        """Wait until nothing of this gradient is on its way."""
        while any(one is whose for one in self._coming.owners):
            self._coming.finish_oldest()


def equal_parts(numel: int, most: int) -> Iterable[tuple[int, int]]:
    """Cut elements into parts [begin, end) of at most `most`."""
    return ((begin, min(begin + most, numel)) for begin in range(0, numel, most))
