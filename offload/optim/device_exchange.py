"""Values of buckets on devices, on their way between the devices of several ranks.

The buffers are on the device, too. Own values come from the parameters' own memory, the others go
there, and nothing of it passes through host memory: all of a round is work for the stream between
devices, in its order, so that a buffer is free again as soon as the device has been told. Gradients
are put into a buffer by the stream that has made them, and only this rank's mean comes to the host.
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
    """parts: host memory for what is added to another, one for each buffer; may be empty."""

    def __init__(
        self, network: DeviceNetwork, buckets: Buckets, parts: Sequence[Tensor], metrics: Metrics
    ) -> None:
        self._network, self._transfer = network, network.transfer
        made = [self._transfer.allocate(buckets.whole_bytes, "a network buffer") for _ in parts]
        for buffer in made:  # what no parameter fills goes across, too: no NaN that is nobody's
            buffer.use().zero_()
            buffer.note_fill()
        buffers = [
            BucketBuffer(b.use, part, b.release) for b, part in zip(made, parts, strict=True)
        ]
        super().__init__(network.ranks, buckets, buffers, metrics)
        self._last: Mark | None = None  # behind what has landed
        self._makers: dict[object, Mark] = {}  # behind the last gradient of each stream

    def gather(self, step: Round, dtype: torch.dtype, values: Values, what: str) -> InFlightRound:
        buffer, rank = self.free.pop(), self.ranks.rank
        whole = self.whole(buffer, step, dtype)
        numbers = {place.number for place in step.bucket.places if place.number is not None}
        found = {number: values(number) for number in numbers}
        self._transfer.join()  # own values may still be on their way from the host
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
        """Streams are meant; most programs compute on one."""
        here = self._transfer.mark().stream
        for mark in self._makers.values():
            self._transfer.wait_for(mark)
        return any(stream != here for stream in self._makers)

    def join(self) -> None:
        """This thread's current stream waits; the CPU does not."""
        if self._last is not None:
            self._transfer.wait_for(self._last)
            self._last = None
