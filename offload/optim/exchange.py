"""All-gather and reduce-scatter of buckets through a few buffers.

A buffer holds one round: the parts of all ranks' shards of a bucket that one collective carries.
`Gathering` all-gathers updated values from the ranks that own them, in one order of buckets on all
ranks, while the update of later buckets still runs. The reducer (`reducer.py`) uses the same
buffers for gradients during backward, when no rank gathers. One thread at a time.

With values on devices, one for each rank, the buffers are on the device, too. This rank's values
are copied from the parameters' memory to a buffer and the other ranks' values back, and nothing
passes through host memory. All work of a round is enqueued on the communication stream, in order,
so a buffer is free again as soon as the work is enqueued. The stream that computed a gradient also
copies it to a buffer, and only this rank's shard of the mean is downloaded to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.core.in_flight import InFlight, nothing
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.device.device import Mark
from offload.distributed.consensus import NETWORK
from offload.distributed.device_network import DeviceNetwork
from offload.distributed.ranks import Ranks
from offload.optim.buckets import Bucket, Buckets

# By a parameter's number: its values, or others of the same shape (gradients, say), flat, in the
# order of its memory. None: the values in the buffer, or in the parameter, need no copy.
Values = Callable[[int], Tensor | None]


@dataclass(eq=False)
class BucketBuffer:
    """A buffer for one round. whole: returns the bytes of the round, for use now. part: host memory
    for one rank's part of an addend. release: releases the memory.
    """

    whole: Callable[[], Tensor]
    part: Tensor
    release: Callable[[], object] = lambda: None

    @classmethod
    def in_host(cls, memory: Tensor, buckets: Buckets) -> BucketBuffer:
        """Make a buffer of host memory: a round at its front, one rank's part at its end. They
        overlap unless the memory has room for both.
        """
        whole = memory[: buckets.whole_bytes]
        return cls(lambda: whole, memory[-buckets.part_bytes :])


@dataclass(frozen=True)
class Round:
    """The elements [begin, end) of every rank's shard of a bucket, in this dtype."""

    bucket: Bucket
    dtype: torch.dtype
    begin: int
    end: int

    def put_own(self, whole: Tensor, rank: int, values: Values) -> None:
        """Copy the elements of `rank` to its row of `whole`."""
        for there, given in self._elements_of(rank, whole, values):
            there.copy_(given)

    def take_others(self, whole: Tensor, rank: int, values: Values) -> None:
        """Copy all other ranks' elements from `whole` to `values`."""
        for other in range(len(whole)):
            for here, target in self._elements_of(other, whole, values) if other != rank else ():
                target.copy_(here)

    def _elements_of(
        self, rank: int, whole: Tensor, values: Values
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield where a rank's elements are in `whole`, and where they are in `values`."""
        for span in self.bucket.spans(rank, self.begin, self.end):
            given = values(span.number)
            if given is not None:
                numel = span.end - span.first
                yield whole[rank, span.at : span.at + numel], given[span.first : span.end]


class Exchange:
    """The network buffers of one optimizer, and the ranks it shares its state with. Values and
    buffers are in host memory.
    """

    def __init__(
        self, ranks: Ranks, buckets: Buckets, buffers: Sequence[BucketBuffer], metrics: Metrics
    ) -> None:
        self.ranks, self.buckets, self.metrics = ranks, buckets, metrics
        self.free = list(buffers)

    def rounds(self, bucket: Bucket, dtype: torch.dtype | None = None) -> Iterator[Round]:
        """Cut a bucket into rounds. dtype: of what is exchanged; None: the bucket's own."""
        dtype = dtype or bucket.dtype
        for begin, end in bucket.rounds(self.buckets.whole_bytes, dtype.itemsize):
            yield Round(bucket, dtype, begin, end)

    def whole(self, buffer: BucketBuffer, step: Round) -> Tensor:
        """View a buffer as the round's elements, one row for each rank."""
        numel = self.ranks.count * (step.end - step.begin)
        flat = buffer.whole()[: numel * step.dtype.itemsize].view(step.dtype)
        return flat.view(self.ranks.count, -1)

    def gather(self, step: Round, values: Values, what: str, flights: InFlight[None]) -> None:
        """Begin the all-gather of a round in a free buffer. This rank's own values must be final.
        When it is taken in, the other ranks' values are stored, or (on a device) are certain to be
        after `join`, and the buffer is free.
        """
        buffer = self.free.pop()
        ticket, take_in = self._begin_gather(step, self.whole(buffer, step), values, what)
        flights.add(ticket, take_in, partial(self.free.append, buffer), None)

    def _begin_gather(
        self, step: Round, whole: Tensor, values: Values, what: str
    ) -> tuple[Ticket[Any], Callable[[], object]]:
        rank = self.ranks.rank
        step.put_own(whole, rank, values)
        ticket = self.ranks.gather(whole, whole[rank], what)
        return ticket, partial(step.take_others, whole, rank, values)

    def reduce(self, whole: Tensor, own: Tensor, what: str) -> Ticket[Any]:
        """Reduce-scatter a buffer: `own`, host memory, becomes the mean over all ranks of this
        rank's row.
        """
        return self.ranks.reduce_scatter(own, whole, what)

    def note_maker(self) -> None:
        """Note that the calling thread's current stream has made a gradient."""

    def wait_for_makers(self) -> bool:
        """Order the caller's next work behind all streams that made gradients. Return whether any
        of them is not the caller's: then gradients must be held until they have been reduced.
        """
        return False

    def join(self) -> None:
        """Order the caller's next work behind the values that have landed."""

    def wait(self, ticket: Ticket[Any]) -> Any:
        """Wait for a collective; the metrics count the time as network time."""
        if ticket.done:
            return ticket.wait()
        with self.metrics.span(NETWORK, ticket.what):
            return ticket.wait()

    def close(self) -> None:
        """Release the buffers, except those that are still in flight after an error."""
        while self.free:
            self.free.pop().release()


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

    def _begin_gather(
        self, step: Round, whole: Tensor, values: Values, what: str
    ) -> tuple[Ticket[Any], Callable[[], object]]:
        rank = self.ranks.rank
        numbers = {place.number for place in step.bucket.places if place.number is not None}
        found = {number: values(number) for number in numbers}
        self._transfer.join()  # uploads of own values may still be in flight
        ticket = self._network.gather_there(
            whole,
            lambda: step.put_own(whole, rank, found.__getitem__),
            lambda: step.take_others(whole, rank, found.__getitem__),
            what,
        )
        return ticket, nothing

    def wait(self, ticket: Ticket[Any]) -> Any:
        result = super().wait(ticket)
        if isinstance(result, Mark):  # behind an all-gather
            self._last = result
        return result

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


class Gathering:
    """An all-gather of some buckets, in rounds. values: own elements are read from there, other
    ranks' are written there. is_ready: whether this rank's own values of a bucket are final. dtype:
    of the values; None: each bucket's own.
    """

    def __init__(
        self,
        exchange: Exchange,
        buckets: Sequence[Bucket],
        values: Values,
        what: str,
        is_ready: Callable[[Bucket], bool] = lambda _: True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._exchange = exchange
        self._values, self._what, self._is_ready = values, what, is_ready
        self._left: deque[Round] = deque(
            step for bucket in buckets for step in exchange.rounds(bucket, dtype)
        )
        # The buffer of a round that failed may still be written to, and is not freed.
        self._flying: InFlight[None] = InFlight(exchange.wait)

    def advance(self) -> None:
        """Land the rounds that have arrived and begin those that are ready. Never waits."""
        exchange = self._exchange
        self._flying.finish_what_has_ended()
        while self._left and exchange.free and self._is_ready(self._left[0].bucket):
            step = self._left[0]
            exchange.gather(step, self._values, self._name(step), self._flying)
            self._left.popleft()

    def finish(self) -> None:
        """Wait until every rank has the values of all ranks, for any work that follows."""
        self.advance()
        while self._flying:
            self._flying.finish_oldest()
            self.advance()
        assert not self._left, "everything is ready by now"
        self._exchange.join()

    def break_off(self, error: BaseException) -> None:
        """End the gathering after an error: tell the other ranks, and wait for the collectives in
        flight, which write to the buffers.
        """
        if self._left:
            ended: Ticket[None] = Ticket("the update")
            ended.fail(error.with_traceback(None))
            own = torch.empty(0, dtype=torch.uint8, device="cpu")
            what = self._name(self._left[0])
            self._settle(self._exchange.ranks.gather(own, own, what, after=ended).wait)
        for _ in range(len(self._flying)):
            self._settle(self._flying.finish_oldest)
        self._settle(self._exchange.join)

    def _settle(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:
            self._exchange.metrics.count("errors_after_an_error")

    def _name(self, step: Round) -> str:
        return f"{self._what} of {step.bucket.name}"
