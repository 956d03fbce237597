"""Collectives on buckets whose parameters are on devices, one device per rank.

The buffers are on the device, too. This rank's values are copied from the parameters' memory to a
buffer and the other ranks' values back, and nothing passes through host memory. All work of a round
is enqueued on the communication stream, in order, so a buffer is free again as soon as the work is
enqueued. The stream that computed a gradient also copies it to a buffer, and only this rank's shard
of the mean is downloaded to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.device import Mark
from offload.distributed.device_network import DeviceNetwork
from offload.optim.buckets import Buckets
from offload.optim.exchange import BucketBuffer, Exchange, InFlightRound, Round, Values


class DeviceExchange(Exchange):
    """An exchange whose values and buffers are in device memory. parts: host memory for addends of
    gradients, one for each buffer; each may be empty.
    """

    def __init__(
        self, network: DeviceNetwork, buckets: Buckets, parts: Sequence[Tensor], metrics: Metrics
    ) -> None:
        self._network, self._transfer = network, network.transfer
        made = [self._transfer.allocate(buckets.whole_bytes, "a network buffer") for _ in parts]
        for buffer in made:  # padding is sent, too: it must not contain a NaN
            buffer.use().zero_()
            buffer.note_fill()
        buffers = [
            BucketBuffer(b.use, part, b.release) for b, part in zip(made, parts, strict=True)
        ]
        super().__init__(network.ranks, buckets, buffers, metrics)
        self._last: Mark | None = None  # on the stream, behind the last round that has landed
        self._makers: dict[object, Mark] = {}  # by stream, behind its last gradient

    def gather(self, step: Round, dtype: torch.dtype, values: Values, what: str) -> InFlightRound:
        buffer, rank = self.free.pop(), self.ranks.rank
        whole = self.whole(buffer, step, dtype)
        numbers = {place.number for place in step.bucket.places if place.number is not None}
        found = {number: values(number) for number in numbers}
        self._transfer.join()  # uploads of own values may still be in flight
        ticket = self._network.gather_there(
            whole,
            lambda: step.put_own(whole, rank, found.__getitem__),
            lambda: step.take_others(whole, rank, found.__getitem__),
            what,
        )
        return InFlightRound(buffer, ticket, self._note)

    def _note(self, mark: Mark) -> None:
        self._last = mark

    def reduce(self, whole: Tensor, own: Tensor, what: str) -> Ticket[Any]:
        return self._network.reduce_there(whole, own, what)

    def note_maker(self) -> None:
        mark = self._transfer.mark()
        self._makers[mark.stream] = mark

    def wait_for_makers(self) -> bool:
        """Make the current stream wait for all streams that made gradients. Return whether there
        was any other than the current one; most programs compute on one.
        """
        here = self._transfer.mark().stream
        for mark in self._makers.values():
            self._transfer.wait_for(mark)
        return any(stream != here for stream in self._makers)

    def join(self) -> None:
        """Make this thread's current stream wait for the rounds that have landed; the CPU does not
        wait.
        """
        if self._last is not None:
            self._transfer.wait_for(self._last)
            self._last = None
