"""Values of buckets on their way between ranks, through a few buffers.

A buffer holds one round: everybody's part of a bucket. `Gathering` brings values from those who own
them to everybody, in one order of buckets on all ranks, while others are still being made; the
reducer (`reducer.py`) uses the same buffers for gradients during backward, when nobody gathers. One
thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.metrics import Metrics
from offload.optim.buckets import Bucket, Buckets
from offload.shard import Ranks
from offload.ticket import Ticket

NETWORK = "network"  # the cause of waiting for other ranks


@dataclass(eq=False)
class Buffer:
    """whole: bytes of a round. part: bytes of one rank's part, for what is added to another."""

    whole: Tensor
    part: Tensor


@dataclass(frozen=True)
class Round:
    """Elements [begin, end) of everybody's slice of a bucket."""

    bucket: Bucket
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Exchange:
    """The buffers of one optimizer, and the ranks that it shares with."""

    def __init__(
        self, ranks: Ranks, buckets: Buckets, memory: Iterable[Tensor], metrics: Metrics
    ) -> None:
        self.ranks, self.buckets, self.metrics = ranks, buckets, metrics
        whole_bytes = self._whole_bytes = buckets.whole_bytes
        self.free = [Buffer(one[:whole_bytes], one[-buckets.part_bytes :]) for one in memory]

    def rounds(self, bucket: Bucket, dtype: torch.dtype) -> Iterator[Round]:
        for begin, end in bucket.rounds(self._whole_bytes, dtype.itemsize):
            yield Round(bucket, begin, end)

    def whole(self, buffer: Buffer, step: Round, dtype: torch.dtype) -> Tensor:
        """As rows: one part for each rank."""
        numel = self.ranks.count * step.numel
        flat = buffer.whole[: numel * dtype.itemsize].view(dtype)
        return flat.view(self.ranks.count, step.numel)

    def wait(self, ticket: Ticket[None]) -> None:
        """For the network; the time is told."""
        if ticket.done:
            ticket.wait()
            return
        with self.metrics.span(NETWORK, ticket.what):
            ticket.wait()


# The elements of a parameter's values, or of what is like them, in the order of its memory. None:
# they are as they should be.
Values = Callable[[int], Tensor | None]


@dataclass(frozen=True, eq=False)
class _Flight:
    step: Round
    buffer: Buffer
    whole: Tensor
    ticket: Ticket[None]


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
        self._flying: deque[_Flight] = deque()

    def advance(self) -> None:
        """Start what is ready and land what has come. Never waits."""
        while self._flying and self._flying[0].ticket.done:
            self._land()
        while self._left and self._exchange.free and self._is_ready(self._left[0].bucket):
            self._start()

    def finish(self) -> None:
        """Return when everybody's values are everywhere."""
        self.advance()
        while self._flying:
            self._land()
            self.advance()
        assert not self._left, "everything is ready by now"

    def break_off(self, error: BaseException) -> None:
        """After an error: tell the other ranks, and let nobody write to the buffers any more."""
        if self._left:
            ended: Ticket[None] = Ticket("the update")
            ended.fail(error.with_traceback(None))
            own = torch.empty(0, dtype=torch.uint8, device="cpu")
            what = self._name(self._left[0])
            self._settle(self._exchange.ranks.gather(own, own, what, after=ended))
        while self._flying:
            flight = self._flying.popleft()
            if self._settle(flight.ticket):
                self._exchange.free.append(flight.buffer)

    def _settle(self, ticket: Ticket[None]) -> bool:
        try:
            ticket.wait()
        except Exception:
            self._exchange.metrics.count("errors_after_an_error")
            return False
        return True

    def _name(self, step: Round) -> str:
        return f"{self._what} of {step.bucket.name}"

    def _start(self) -> None:
        step, exchange = self._left[0], self._exchange
        buffer = exchange.free.pop()
        whole = exchange.whole(buffer, step, self._dtype_of(step.bucket))
        rank = exchange.ranks.rank
        for span in step.bucket.spans(rank, step.begin, step.end):
            values = self._values(span.number)
            if values is not None:
                whole[rank, span.at : span.at + span.end - span.first].copy_(
                    values[span.first : span.end]
                )
        ticket = exchange.ranks.gather(whole, whole[rank], self._name(step))
        self._left.popleft()
        self._flying.append(_Flight(step, buffer, whole, ticket))

    def _land(self) -> None:
        flight, exchange = self._flying[0], self._exchange
        exchange.wait(flight.ticket)
        for rank in range(exchange.ranks.count):
            if rank == exchange.ranks.rank:
                continue
            for span in flight.step.bucket.spans(rank, flight.step.begin, flight.step.end):
                values = self._values(span.number)
                if values is not None:
                    values[span.first : span.end].copy_(
                        flight.whole[rank, span.at : span.at + span.end - span.first]
                    )
        self._flying.popleft()
        exchange.free.append(flight.buffer)
