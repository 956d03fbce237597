"""Values of buckets on their way between ranks, through a few buffers.

A buffer holds one round: everybody's part of a bucket. `Gathering` brings values from those who own
them to everybody, in one order of buckets on all ranks, while others are still being made; the
reducer (`reducer.py`) uses the same buffers for gradients during backward, when nobody gathers. One
thread at a time. `device_exchange.py` does the same for values on devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.distributed import Ranks
from offload.optim.buckets import Bucket, Buckets

NETWORK = "network"  # the cause of waiting for other ranks

# The elements of a parameter's values, or of what is like them, in the order of its memory. None:
# they are as they should be.
Values = Callable[[int], Tensor | None]


@dataclass(eq=False)
class BucketBuffer:
    """whole: gives the bytes of a round, to be used now. part: host bytes of one rank's part, for
    what is added to another. release: gives the memory back.
    """

    whole: Callable[[], Tensor]
    part: Tensor
    release: Callable[[], object] = lambda: None

    @classmethod
    def in_host(cls, memory: Tensor, buckets: Buckets) -> BucketBuffer:
        """Bytes for a round, and a part where there are more."""
        whole = memory[: buckets.whole_bytes]
        return cls(lambda: whole, memory[-buckets.part_bytes :])


@dataclass(frozen=True)
class Round:
    """Elements [begin, end) of everybody's slice of a bucket."""

    bucket: Bucket
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def put_own(self, whole: Tensor, rank: int, values: Values) -> None:
        """Copy a rank's elements to its row of `whole`."""
        for span in self.bucket.spans(rank, self.begin, self.end):
            given = values(span.number)
            if given is not None:
                there = whole[rank, span.at : span.at + span.end - span.first]
                there.copy_(given[span.first : span.end])

    def take_others(self, whole: Tensor, rank: int, values: Values) -> None:
        """Copy all other ranks' elements from there."""
        for other in range(len(whole)):
            if other == rank:
                continue
            for span in self.bucket.spans(other, self.begin, self.end):
                target = values(span.number)
                if target is not None:
                    here = whole[other, span.at : span.at + span.end - span.first]
                    target[span.first : span.end].copy_(here)


@dataclass(frozen=True, eq=False)
class InFlightRound:
    """A round that is being gathered. store: is called with what its ticket brings."""

    buffer: BucketBuffer
    ticket: Ticket[Any]
    store: Callable[[Any], None]


class Exchange:
    """The buffers of one optimizer, and the ranks that it shares with. Values are in host memory,
    and so are the buffers.
    """

    def __init__(
        self, ranks: Ranks, buckets: Buckets, buffers: Sequence[BucketBuffer], metrics: Metrics
    ) -> None:
        self.ranks, self.buckets, self.metrics = ranks, buckets, metrics
        self.free = list(buffers)

    def rounds(self, bucket: Bucket, dtype: torch.dtype) -> Iterator[Round]:
        for begin, end in bucket.rounds(self.buckets.whole_bytes, dtype.itemsize):
            yield Round(bucket, begin, end)

    def whole(self, buffer: BucketBuffer, step: Round, dtype: torch.dtype) -> Tensor:
        """As rows: one part for each rank."""
        numel = self.ranks.count * step.numel
        flat = buffer.whole()[: numel * dtype.itemsize].view(dtype)
        return flat.view(self.ranks.count, step.numel)

    def gather(self, step: Round, dtype: torch.dtype, values: Values, what: str) -> InFlightRound:
        """Start a round, in a buffer that is free: own values, which are there, go to all others.
        `land` has to follow.
        """
        buffer, rank = self.free.pop(), self.ranks.rank
        whole = self.whole(buffer, step, dtype)
        step.put_own(whole, rank, values)
        ticket = self.ranks.gather(whole, whole[rank], what)
        return InFlightRound(buffer, ticket, lambda _: step.take_others(whole, rank, values))

    def land(self, flight: InFlightRound) -> None:
        """Return when the others' values are here, or may be counted on after `join`."""
        flight.store(self.wait(flight.ticket))
        self.free.append(flight.buffer)

    def reduce(self, whole: Tensor, own: Tensor, what: str) -> Ticket[Any]:
        """Make `own`, host memory, the mean of everybody's row of a buffer that is this rank's."""
        return self.ranks.reduce_scatter(own, whole, what)

    def note_maker(self) -> None:
        """Whoever calls has made a gradient."""

    def wait_for_makers(self) -> bool:
        """All of them come before what the caller does next. Whether there are others than the
        caller: then gradients must be held until they have been reduced.
        """
        return False

    def join(self) -> None:
        """What has landed can be used by whatever comes next."""

    def wait(self, ticket: Ticket[Any]) -> Any:
        """For the network; the time is told."""
        if ticket.done:
            return ticket.wait()
        with self.metrics.span(NETWORK, ticket.what):
            return ticket.wait()

    def close(self) -> None:
        """Give the buffers back, but for those that are still under way after an error."""
        while self.free:
            self.free.pop().release()


class Gathering:
    """Everybody's own part of some buckets to everybody. values: own elements are read from there,
    the others are written there. is_ready: whether this rank's own are what they will be.
    """

    def __init__(
        self,
        exchange: Exchange,
        buckets: Sequence[Bucket],
        dtype_of: Callable[[Bucket], torch.dtype],
        values: Values,
        what: str,
        is_ready: Callable[[Bucket], bool] = lambda _: True,
    ) -> None:
        self._exchange = exchange
        self._values, self._what, self._is_ready = values, what, is_ready
        self._dtype_of = dtype_of
        self._left: deque[Round] = deque(
            step for bucket in buckets for step in exchange.rounds(bucket, dtype_of(bucket))
        )
        self._flying: deque[InFlightRound] = deque()

    def advance(self) -> None:
        """Start what is ready and land what has come. Never waits."""
        while self._flying and self._flying[0].ticket.done:
            self._land()
        while self._left and self._exchange.free and self._is_ready(self._left[0].bucket):
            self._start()

    def finish(self) -> None:
        """Return when everybody's values are everywhere, for whatever comes next."""
        self.advance()
        while self._flying:
            self._land()
            self.advance()
        assert not self._left, "everything is ready by now"
        self._exchange.join()

    def break_off(self, error: BaseException) -> None:
        """After an error: tell the other ranks, and let nobody write to the buffers any more."""
        if self._left:
            ended: Ticket[None] = Ticket("the update")
            ended.fail(error.with_traceback(None))
            own = torch.empty(0, dtype=torch.uint8, device="cpu")
            what = self._name(self._left[0])
            self._settle(self._exchange.ranks.gather(own, own, what, after=ended).wait)
        while self._flying:
            # Where it has failed its buffer may still be written to, and is not free.
            self._settle(partial(self._exchange.land, self._flying.popleft()))
        self._settle(self._exchange.join)

    def _settle(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:
            self._exchange.metrics.count("errors_after_an_error")

    def _name(self, step: Round) -> str:
        return f"{self._what} of {step.bucket.name}"

    def _start(self) -> None:
        step, exchange = self._left[0], self._exchange
        dtype = self._dtype_of(step.bucket)
        self._flying.append(exchange.gather(step, dtype, self._values, self._name(step)))
        self._left.popleft()

    def _land(self) -> None:
        self._exchange.land(self._flying[0])
        self._flying.popleft()
