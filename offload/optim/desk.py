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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.layout import Chunk, Slice
from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.planner import desk_spans
from offload.ticket import Ticket
from offload.transfer import DeviceTransfer, Mark


@dataclass
class Desk:
    """Host memory for the slices of one chunk: parameter and gradient of each."""

    memory: Tensor  # bytes
    slices: dict[Slice, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tickets: list[Ticket[Tensor]] = field(default_factory=list)


class Desks:
    """All desks of one optimizer, and the transfers to its devices."""

    def __init__(
        self,
        records: Sequence[Record],
        memory: Sequence[Tensor],
        transfers: Mapping[torch.device, DeviceTransfer],
    ) -> None:
        self._records = records
        self._free = [Desk(one) for one in memory]
        self._away: deque[Desk] = deque()  # their parameters are on the way to the device
        self._transfers = transfers
        self._marks: dict[torch.device, Mark] = {}
        self._grads: Mapping[int, Tensor] = {}

    def begin_step(self, grads: Mapping[int, Tensor]) -> None:
        """Remember where each device is: what it was given before is done with the parameters."""
        self._grads = grads
        self._marks = {device: t.mark() for device, t in self._transfers.items()}

    def end_step(self) -> None:
        """What devices are given from now on comes after the new parameters."""
        for transfer in self._transfers.values():
            transfer.join()

    def needs(self, chunk: Chunk) -> bool:
        return bool(self._transfers) and any(self._is_moved(part) for part in chunk.slices)

    def _is_moved(self, part: Slice) -> bool:
        return part.param in self._grads and not self._records[part.param].param.is_cpu

    @property
    def has_free(self) -> bool:
        """Whether `take` need not wait."""
        while self._away and all(ticket.done for ticket in self._away[0].tickets):
            self._clear_oldest()
        return bool(self._free)

    @property
    def has_any(self) -> bool:
        """Whether `take` is possible at all: a desk is free, or will be."""
        return bool(self._free or self._away)

    def _clear_oldest(self) -> None:
        desk = self._away.popleft()
        for ticket in desk.tickets:
            ticket.wait()
        self.give_back(desk)

    def take(self, chunk: Chunk) -> Desk:
        """A desk with the chunk's slices on their way to it; waits for one if it must."""
        if not self.has_free:
            self._clear_oldest()
        desk = self._free.pop()
        for part, (begin, middle, end) in desk_spans(chunk, self._widths()).items():
            if self._is_moved(part):
                param, grad = self._on_device(part)
                there = (
                    desk.memory[begin:middle].view(param.dtype)[: param.numel()],
                    desk.memory[middle:end].view(grad.dtype)[: grad.numel()],
                )
                desk.slices[part] = there
                transfer, mark = self._transfers[param.device], self._marks[param.device]
                what = self._records[part.param].name
                desk.tickets += [
                    transfer.read(param, there[0], what, mark),
                    transfer.read(grad, there[1], what, mark),
                ]
        return desk

    def send_back(self, desk: Desk) -> None:
        """Start the way of the updated parameters to the device. The desk comes back by itself."""
        for part, (host, _) in desk.slices.items():
            param, _ = self._on_device(part)
            transfer, mark = self._transfers[param.device], self._marks[param.device]
            name = self._records[part.param].name
            desk.tickets.append(transfer.write(host, param, mark, name))
        self._away.append(desk)

    def give_back(self, desk: Desk) -> None:
        desk.slices, desk.tickets = {}, []
        self._free.append(desk)

    def _on_device(self, part: Slice) -> tuple[Tensor, Tensor]:
        param = flat(self._records[part.param].param)[part.begin : part.end]
        return param, self._grads[part.param][part.begin : part.end]

    def _widths(self) -> list[int]:
        return [record.desk_bytes for record in self._records]

    def close(self) -> None:
        for transfer in self._transfers.values():
            transfer.close()
