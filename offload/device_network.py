"""Blocks of several ranks on their devices: gathered from slices in host memory, and summed up to
such slices.

Each rank moves only its own slice between its host memory and its device; the devices do the rest
among themselves, on a stream of their own. The order is that of `Ranks`: the ranks tell one another
what comes next, and only then the device is given its work. Nothing here blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload.shard import Ranks
from offload.ticket import Ticket
from offload.transfer import DeviceBuffer, DeviceTransfer


class DeviceNetwork:
    """Of one device among those of `ranks`, who all make one."""

    def __init__(self, ranks: Ranks, transfer: DeviceTransfer) -> None:
        self.ranks, self.transfer = ranks, transfer
        self._link = ranks.link(transfer.device)

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
            lift = buffer.fill(own, begin)
            buffer.spread(self._link.gather)
            return lift

        return self.ranks.gather_by(act, own.nbytes, what, after)

    def reduce_scatter(
        self, buffer: DeviceBuffer, dtype: torch.dtype, target: Tensor, what: str
    ) -> Ticket[Tensor]:
        """Make `target`, host memory, the mean of everybody's part of the buffer that is this
        rank's. What this thread's current stream has been given so far fills the buffer, which is
        used up, and must not be released before the end.
        """
        begin = self.ranks.rank * target.nbytes
        assert buffer.nbytes == self.ranks.count * target.nbytes, what
        whole, mark = buffer.use(), self.transfer.mark()

        def act() -> Ticket[Tensor]:
            there = self.transfer.across(
                lambda: self._link.reduce_scatter(whole.view(dtype)), after=mark
            )
            mine = whole[begin : begin + target.nbytes].view(dtype)
            return self.transfer.read(mine.view(target.shape), target, what, after=there)

        return self.ranks.reduce_by(act, target.nbytes, what).then(lambda reading: reading)
