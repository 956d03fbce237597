"""The way of device parameters and gradients to the host and back, slice by slice.

The kernels run on the host. For a chunk whose parameters are on a device, the slices of parameters
and gradients are copied to a desk: a piece of host memory for one chunk. There they are updated,
and the parameters go back. There are a few desks, so that the copies of the next chunks run while
one is worked on. The parameter is read from the device each time, so whatever somebody has put into
it counts. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from offload.layout import Chunk, Slice
from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.planner import desk_spans
from offload.spilled_gradient import Gradient, in_memory
from offload.ticket import Ticket
from offload.transfer import DeviceTransfer, Mark


class Awaited(Protocol):
    """Something under way: a ticket, say."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass
class Desk:
    """Host memory for the slices of one chunk: parameter and gradient of each."""

    memory: Tensor  # bytes
    slices: dict[Slice, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tickets: list[Awaited] = field(default_factory=list)


class Arriving(Protocol):
    """A gradient that is in host memory, or comes there by itself."""

    memory: Tensor

    def take_ticket(self) -> list[Ticket[Tensor]]:
        """What has to be waited for before `memory` is used; once."""


class Places(Protocol):
    """Where the update finds parameters and gradients that are not simply in host memory."""

    def begin_step(self, grads: Mapping[int, Gradient], homes: Mapping[int, Arriving]) -> None: ...

    def end_step(self) -> None: ...

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        """The order in which these chunks, all of the step, are best taken. at_hand: numbers of
        those whose state is in a buffer; they come first.
        """

    def needs(self, chunk: Chunk) -> bool:
        """Whether the update of a chunk needs a desk."""

    def has_place(self, chunk: Chunk, may_wait: bool) -> bool:
        """Whether `take` is possible now or, if it may wait, at all."""

    def take(self, chunk: Chunk) -> Desk:
        """A desk with the chunk's slices on their way to it."""

    def values(self, part: Slice) -> Tensor:
        """Of a parameter's slice, now."""

    def send_back(self, desk: Desk) -> None:
        """What is on the desk has changed. It comes back by itself."""

    def give_back(self, desk: Desk) -> None:
        """Nothing on it has changed."""

    def break_off(self) -> None:
        """The step has failed; whatever was taken for it is not needed any more."""

    def close(self) -> None: ...


class Desks:
    """All desks of one optimizer, and the transfers to its devices."""

    def __init__(
        self,
        records: Sequence[Record],
        memory: Sequence[Tensor],
        transfers: Mapping[torch.device, DeviceTransfer],
        has_no_grads: bool,
    ) -> None:
        self._records = records
        self._free = [Desk(one) for one in memory]
        self._away: deque[Desk] = deque()  # their parameters are on the way to the device
        self._transfers = transfers
        self._marks: dict[torch.device, Mark] = {}
        self._has_no_grads = has_no_grads  # gradients have host memory of their own
        self._grads: Mapping[int, Tensor] = {}
        self._homes: Mapping[int, Arriving] = {}

    def begin_step(self, grads: Mapping[int, Gradient], homes: Mapping[int, Arriving]) -> None:
        """Remember where each device is: what it was given before is done with the parameters.
        homes: gradients that need no desk.
        """
        self._grads, self._homes = in_memory(grads), homes
        self._marks = {device: t.mark() for device, t in self._transfers.items()}

    def end_step(self) -> None:
        """What devices are given from now on comes after the new parameters."""
        for transfer in self._transfers.values():
            transfer.join()
        self._grads, self._homes = {}, {}  # gradients belong to the parameters

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
        """Whether `take` is possible: a desk is free or, if it may wait, will be."""
        return self.has_free or (may_wait and bool(self._away))

    def _clear_oldest(self) -> None:
        desk = self._away.popleft()
        for ticket in desk.tickets:
            ticket.wait()
        self.give_back(desk)

    def borrow(self) -> Desk:
        """An empty desk; waits for one if it must."""
        if not self.has_free:
            self._clear_oldest()
        return self._free.pop()

    def take(self, chunk: Chunk) -> Desk:
        """A desk with the chunk's slices on their way to it; waits for one if it must."""
        desk = self.borrow()
        spans = desk_spans(chunk, self._widths(), self._has_no_grads)
        for part, (begin, middle, end) in spans.items():
            if self._is_moved(part):
                param = self._param(part)
                here = self._lower(desk, part, param, desk.memory[begin:middle])
                desk.slices[part] = here, self._gradient(desk, part, desk.memory[middle:end])
        return desk

    def _lower(self, desk: Desk, part: Slice, source: Tensor, memory: Tensor) -> Tensor:
        """Start the copy of a slice from its device to a place on the desk."""
        here = memory.view(source.dtype)[: source.numel()]
        transfer, mark = self._transfers[source.device], self._marks[source.device]
        desk.tickets.append(transfer.read(source, here, self._records[part.param].name, mark))
        return here

    def _gradient(self, desk: Desk, part: Slice, memory: Tensor) -> Tensor:
        home, grad = self._homes.get(part.param), self._grads[part.param]
        if home is None and grad.is_cpu:  # averaged over ranks: of our own elements only
            first, _ = self._records[part.param].own or (0, 0)
            return grad[part.begin - first : part.end - first]
        if home is None:
            return self._lower(desk, part, grad[part.begin : part.end], memory)
        # Chunks are worked on in the order in which they are taken: the first one's wait is enough.
        desk.tickets += home.take_ticket()
        return home.memory[part.begin : part.end]

    def send_back(self, desk: Desk) -> None:
        """Start the way of the updated parameters to the device. The desk comes back by itself."""
        for part, (host, _) in desk.slices.items():
            param = self._param(part)
            transfer, mark = self._transfers[param.device], self._marks[param.device]
            name = self._records[part.param].name
            desk.tickets.append(transfer.write(host, param, mark, name))
        self._away.append(desk)

    def values(self, part: Slice) -> Tensor:
        return self._param(part)

    def give_back(self, desk: Desk) -> None:
        desk.slices, desk.tickets = {}, []
        self._free.append(desk)

    def break_off(self) -> None:
        """Nothing: desks come back by themselves."""

    def _param(self, part: Slice) -> Tensor:
        return flat(self._records[part.param].local)[part.begin : part.end]

    def _widths(self) -> list[int]:
        return [record.device_bytes for record in self._records]

    def close(self) -> None:
        for transfer in self._transfers.values():
            transfer.close()
