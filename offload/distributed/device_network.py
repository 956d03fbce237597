"""Blocks of several ranks on their devices: gathered from slices in host memory or on the device,
and summed up to slices in host memory.

Each rank moves only its own slice between its host memory and its device; the devices do the rest
among themselves, on a stream of their own. The order is that of `Ranks`: the ranks tell one another
what comes next, and only then the device is given its work. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.core.ticket import Ticket
from offload.device import DeviceBuffer, DeviceTransfer, Mark, Moment
from offload.distributed import DeviceLink, Ranks


class DeviceNetwork:
    """Of one device among those of `ranks`, who all make one. link: None makes one."""

    def __init__(
        self, ranks: Ranks, transfer: DeviceTransfer, link: DeviceLink | None = None
    ) -> None:
        self.ranks, self.transfer = ranks, transfer
        self._link = link or ranks.link(transfer.device)

    def gather(
        self, buffer: DeviceBuffer, own: Tensor, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[Ticket[None]]:
        """Fill a buffer with everybody's `own`, host memory that has its values once `after` has
        ended. Ends when the device has been told; the buffer can be used then. Its result ends
        when `own` has been read.
        """
        begin = self.ranks.rank * own.nbytes
        assert buffer.nbytes == self.ranks.count * own.nbytes, what

        def act() -> Ticket[None]:
            self.transfer.take_thread()
            upload = buffer.fill(own, begin)
            buffer.spread(self._link.gather)
            return upload

        return self.ranks.gather_by(act, own.nbytes, what, after)

    def gather_there(
        self, whole: Tensor, load: Callable[[], None], store: Callable[[], None], what: str
    ) -> Ticket[Mark]:
        """Fill `whole`, device memory with a row for each rank, with everybody's own. `load` fills
        our row and `store` uses all of them: their work goes to the stream between devices, behind
        what this thread's current stream has been given so far. Ends when the device has been told.
        Its result is the place behind `store`; until then all that they touch must be held.
        """
        mark = self.transfer.mark()

        def work() -> None:
            load()
            self._link.gather(whole)
            store()

        def act() -> Mark:
            self.transfer.take_thread()
            return self.transfer.across(work, after=[mark.event])

        return self.ranks.gather_by(act, whole.nbytes // self.ranks.count, what)

    def reduce_scatter(
        self, buffer: DeviceBuffer, dtype: torch.dtype, target: Tensor, what: str
    ) -> Ticket[Tensor]:
        """Make `target`, host memory, the mean of everybody's part of the buffer that is this
        rank's. What its users' streams have been given so far fills the buffer, which is used up,
        and must not be released before the end.
        """
        whole = buffer.use().view(dtype)
        return self._reduce(whole, target, what, buffer.busy())

    def reduce_there(self, whole: Tensor, target: Tensor, what: str) -> Ticket[Tensor]:
        """The same for device memory with a part for each rank, which this thread's current stream
        has filled. It must be held until the end, and not be filled again.
        """
        return self._reduce(whole, target, what, [self.transfer.mark().event])

    def _reduce(
        self, whole: Tensor, target: Tensor, what: str, after: list[Moment]
    ) -> Ticket[Tensor]:
        assert whole.nbytes == self.ranks.count * target.nbytes, what

        def act() -> Ticket[Tensor]:
            self.transfer.take_thread()
            there = self.transfer.across(lambda: self._link.reduce_scatter(whole), after)
            mine = whole.view(self.ranks.count, -1)[self.ranks.rank]
            return self.transfer.read(mine.view(target.shape), target, what, after=there)

        return self.ranks.reduce_by(act, target.nbytes, what).then(lambda reading: reading)
