"""Collectives on blocks in device memory: all-gather from shards in host or device memory, and
reduce-scatter to shards in host memory.

Each rank copies only its own shard between its host memory and its device; the devices exchange the
rest on a stream of their own. The order is that of `Ranks`: the ranks agree on the next collective,
and only then is its work enqueued on the device. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.core.ticket import Ticket
from offload.device.buffer import DeviceBuffer
from offload.device.device import DeviceTransfer, Mark
from offload.device.streams import Moment
from offload.distributed.consensus import GATHER, REDUCE
from offload.distributed.group import DeviceLink
from offload.distributed.ranks import Ranks


class DeviceNetwork:
    """A network between this rank's device and those of the other ranks. All ranks make one. link:
    None connects the devices, which all ranks must do together.
    """

    def __init__(
        self, ranks: Ranks, transfer: DeviceTransfer, link: DeviceLink | None = None
    ) -> None:
        self.ranks, self.transfer = ranks, transfer
        self._link = link or ranks.link(transfer.device)

    def gather(
        self, buffer: DeviceBuffer, own: Tensor, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[Ticket[None]]:
        """All-gather the shards `own` of all ranks in a device buffer. `own` is host memory, and
        has its values once `after` has ended. The ticket ends when the work is enqueued; from then
        on the buffer can be used. Its result is a ticket that ends when `own` has been read.
        """
        begin = self.ranks.rank * own.nbytes
        assert buffer.nbytes == self.ranks.count * own.nbytes, what

        def act() -> Ticket[None]:
            self.transfer.take_thread()
            upload = buffer.fill(own, begin)
            buffer.spread(self._link.gather)
            return upload

        return self.ranks.on_devices(GATHER, act, own.nbytes, what, after)

    def gather_there(
        self, whole: Tensor, load: Callable[[], None], store: Callable[[], None], what: str
    ) -> Ticket[Mark]:
        """All-gather device memory: `whole` has a row for each rank. `load` fills this rank's row,
        `store` uses all rows; their work goes to the stream between devices, behind the work that
        this thread's current stream has so far. The ticket ends when the work is enqueued. Its
        result is the mark behind `store`; until the stream gets there, the caller must hold all
        memory that `load` and `store` touch.
        """
        mark = self.transfer.mark()

        def work() -> None:
            load()
            self._link.gather(whole)
            store()

        def act() -> Mark:
            self.transfer.take_thread()
            return self.transfer.across(work, after=[mark.event])

        return self.ranks.on_devices(GATHER, act, whole.nbytes // self.ranks.count, what)

    def reduce_scatter(
        self, buffer: DeviceBuffer, dtype: torch.dtype, target: Tensor, what: str
    ) -> Ticket[Tensor]:
        """Reduce-scatter a device buffer: `target`, host memory, becomes the mean over all ranks of
        this rank's part. It runs behind the work that the buffer's streams have so far. The buffer
        is overwritten, and must not be released before the ticket ends.
        """
        whole = buffer.use().view(dtype)
        return self._reduce(whole, target, what, buffer.busy())

    def reduce_there(self, whole: Tensor, target: Tensor, what: str) -> Ticket[Tensor]:
        """Reduce-scatter device memory with a part for each rank, filled on this thread's current
        stream, in the same way. The caller must hold it, and not fill it again, until the ticket
        ends.
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

        return self.ranks.on_devices(REDUCE, act, target.nbytes, what).then(lambda reading: reading)
