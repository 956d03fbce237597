"""Sums of gradients in host memory, of what devices compute in one backward pass after the other.

A gradient that is to be added is downloaded to staging buffers, part by part, and added on the
host, in the order of arrival and in the gradient's own dtype: the result has the bits of torch's
own sum on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.core.in_flight import InFlight
from offload.core.locks import uninterrupted
from offload.core.ticket import Ticket, TicketState
from offload.optim.staging import StagingBuffer

# Begins the download of a flat tensor on a device to host memory.
Download = Callable[[Tensor, Tensor], Ticket[Tensor]]
# Takes in values from an element of a flat gradient on: most often adds them.
TakeIn = Callable[[Tensor, int], object]


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
            ticket = download(source[begin:end], values)
            add = partial(take_in, values, begin)
            self._coming.add(ticket, add, partial(self._give_back, buffer), whose)

    def finish_those_of(self, whose: object) -> None:
        """Wait until nothing of this gradient is on its way."""
        while any(one is whose for one in self._coming.owners):
            self._coming.finish_oldest()


def equal_parts(numel: int, most: int) -> Iterable[tuple[int, int]]:
    """Cut elements into parts [begin, end) of at most `most`."""
    return ((begin, min(begin + most, numel)) for begin in range(0, numel, most))
