"""The averaging of gradients over ranks while backward runs: stage 2.

When all gradients of a bucket have arrived, a reduce-scatter gives each rank the mean of its own
slice, and the parameters' gradients become None. Buckets are sent in their order, the same on all
ranks: a complete bucket waits for those before it, and at the end of the pass the remaining ones
are sent, with zeros for gradients that did not arrive. The means of several passes are added up. In
`no_sync` gradients stay with their parameters, autograd accumulates them, and they are reduced with
the next pass, or at the step.

Autograd's hooks call `arrived` and `ended`; no step runs meanwhile.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError, OffloadError, StateError
from offload.core.in_flight import InFlight, nothing
from offload.core.tensors import in_order_of
from offload.optim.buckets import Bucket
from offload.optim.exchange import Exchange, Round
from offload.optim.recipe import Record

HAVING, LEFT = "having", "left"
REDUCED = "which gradients were reduced"


@dataclass
class CarriedGradients:
    """The reducer's gradients on their way from plan to plan. Buckets keep their numbers."""

    slices: dict[int, Tensor]
    params: dict[str, list[Tensor]]


@dataclass
class _ReducedParams:
    """The numbers of parameters that the reducer has seen since the last step, or `zero_grad`."""

    having: set[int] = field(default_factory=set)  # have a gradient on this rank
    taken: set[int] = field(default_factory=set)  # their gradient was taken from them
    kept: set[int] = field(default_factory=set)  # autograd accumulated into one, not taken yet
    released: set[int] = field(default_factory=set)  # had one until it was reduced, used up or not


class Reducer:
    """The reducer of one optimizer's gradients, bucket by bucket. memory: this rank's slices of all
    buckets, as bytes.
    """

    def __init__(self, exchange: Exchange, records: Sequence[Record], memory: Tensor) -> None:
        self._exchange = exchange
        self._records = records
        self._buckets = exchange.buckets
        self._slices: dict[int, Tensor] = {}
        begin = 0
        for bucket in self._buckets.each:
            end = begin + bucket.partition.shard_bytes
            self._slices[bucket.number] = memory[begin:end].view(bucket.dtype)
            begin = end
        # A parameter without elements is in no bucket, and steps all the same.
        self._empty = [r for r in records if not r.is_frozen and not r.param.numel()]
        self._filled: set[int] = set()  # buckets whose slices hold a mean since the last step
        self._of = _ReducedParams()
        # held: gradients whose memory must not be reused before their mean has landed.
        self._flying: InFlight[Sequence[Tensor | None]] = InFlight(exchange.wait)
        self._lock = threading.RLock()
        self.is_syncing = True  # False: in `no_sync`
        self._begin_pass()

    # --- during backward --------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self._next = 0  # the next bucket to send
        self._come: set[int] = set()
        self._missing = Counter(
            {
                bucket.number: sum(place.number is not None for place in bucket.places)
                for bucket in self._buckets.each
            }
        )

    def arrived(self, number: int) -> None:
        """Note that autograd has accumulated into a parameter's gradient, and send the buckets that
        are complete now.
        """
        with self._lock:
            self._of.having.add(number)
            self._of.kept.add(number)
            self._exchange.note_maker()
            if not self.is_syncing or number in self._come:
                return
            self._come.add(number)
            self._missing[self._buckets.bucket_of(number).number] -= 1
            while self._next < len(self._buckets.each) and not self._missing[self._next]:
                self._send_next()

    def ended(self) -> None:
        """Note that the backward pass is over, and send the remaining buckets."""
        with self._lock:
            if self.is_syncing:
                while self._next < len(self._buckets.each):
                    self._send_next()
                self._take_empty()
                self._begin_pass()

    def _take_empty(self) -> None:
        for record in self._empty:
            if record.param.grad is not None:
                record.param.grad = None
                self._of.having.add(record.number)

    def _send_next(self) -> None:
        self._send(self._buckets.each[self._next])
        self._next += 1

    def _send(self, bucket: Bucket) -> None:
        """Start the reduction of the gradients of the bucket's parameters, and set those gradients
        to None.
        """
        has_other_makers = self._exchange.wait_for_makers()
        numbers = [place.number for place in bucket.places if place.number is not None]
        grads = {number: self._gradient_of(self._records[number]) for number in numbers}
        held = [self._records[n].param.grad for n in numbers] if has_other_makers else []
        is_filled = bucket.number in self._filled
        for step in self._exchange.rounds(bucket):
            self._send_round(step, grads, is_filled, held)
        self._filled.add(bucket.number)
        for number, grad in grads.items():
            if grad is not None:
                self._records[number].param.grad = None
                self._of.kept.discard(number)
                self._of.having.add(number)
                self._of.taken.add(number)
                self._of.released.add(number)

    def _gradient_of(self, record: Record) -> Tensor | None:
        grad = record.param.grad
        if grad is None:
            return None
        place, is_dense = record.param.device, grad.layout == torch.strided
        if not is_dense or grad.dtype != record.dtype or grad.device != place:
            raise ConfigError(
                f"{record.name}: expected a dense gradient of {record.dtype} on {place}, got "
                f"{grad.dtype} on {grad.device}, {grad.layout}; sparse ones are not supported: "
                "nn.Embedding(..., sparse=False)"
            )
        return in_order_of(grad.detach().resolve_neg(), record.param)

    def _send_round(
        self,
        step: Round,
        grads: Mapping[int, Tensor | None],
        to_add: bool,
        held: Sequence[Tensor | None],
    ) -> None:
        while not self._exchange.free:
            self._flying.finish_oldest()
        exchange, bucket = self._exchange, step.bucket
        buffer = exchange.free.pop()
        whole = exchange.whole(buffer, step)
        for rank in range(exchange.ranks.count):
            for span in bucket.spans(rank, step.begin, step.end):
                there = whole[rank, span.at : span.at + span.end - span.first]
                grad = grads[span.number]
                if grad is None:
                    there.zero_()
                else:
                    there.copy_(grad[span.first : span.end])
        mine = self._slices[bucket.number][step.begin : step.end]
        part = buffer.part[: mine.nbytes].view(bucket.dtype)
        own = part if to_add else mine
        ticket = exchange.reduce(whole, own, f"the gradients of {bucket.name}")
        take_in = partial(mine.add_, own) if to_add else nothing
        self._flying.add(ticket, take_in, partial(exchange.free.append, buffer), held)

    def drain(self) -> None:
        """Wait until no reduction is in flight; all buffers are free then."""
        self._flying.finish()

    # --- at the step ------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Return what this rank tells the others before a step: which parameters have a gradient,
        as bits, and which buckets have gradients that were not reduced.
        """
        self._begin_pass()
        self._refuse_foreign()
        self._take_empty()
        here = {n for n in self._buckets.numbers if self._records[n].param.grad is not None}
        left = {self._buckets.bucket_of(number).number for number in here}
        having = self._of.having | here
        bits = sum(1 << number for number in having)
        filled = zlib.crc32(repr(sorted(self._filled)).encode())
        return {HAVING: f"{bits:x}", LEFT: sorted(left), REDUCED: filled}

    def _refuse_foreign(self) -> None:
        for number in self._of.taken - self._of.kept:
            if self._records[number].param.grad is not None:
                raise StateError(
                    f"{self._records[number].name}: its gradient was taken away in backward to be "
                    "averaged over ranks, and now it has one again; with release_grads=True the "
                    "model must not be in DistributedDataParallel, which averages gradients itself"
                )

    def settle(self, said: Sequence[Mapping[str, Any]]) -> dict[int, Tensor]:
        """Reduce the gradients that are left on any rank. Return this rank's part of each gradient
        that any rank has.
        """
        for number in sorted({number for one in said for number in one[LEFT]}):
            self._send(self._buckets.each[number])
        self.drain()
        bits = 0
        for one in said:
            bits |= int(one[HAVING], 16)
        numbers = [*self._buckets.numbers, *(record.number for record in self._empty)]
        return {n: self._own(n) for n in sorted(numbers) if bits >> n & 1}

    def _own(self, number: int) -> Tensor:
        """Return this rank's part of a parameter's gradient."""
        first, end = self._buckets.own(number) or (0, 0)
        if first == end:
            return torch.empty(0, dtype=self._records[number].dtype, device="cpu")
        bucket, place = self._buckets.place_of(number)
        begin = place.begin + first - self._buckets.rank * bucket.shard_numel
        return self._slices[bucket.number][begin : begin + end - first]

    def used(self) -> None:
        """Note that the step has used all gradients up."""
        self._filled.clear()
        self._of = _ReducedParams(released=self._of.released)

    def zero_grad(self, set_to_none: bool) -> None:
        """Do what the optimizer's `zero_grad` does, for the gradients that were taken from the
        parameters: drop them, or make them zero, including those that a step has used up.
        """
        with self._lock:
            self._drop()
            self._begin_pass()
            self.used()
            if set_to_none:
                self._of = _ReducedParams()
                return
            for number in self._of.released:
                bucket = self._buckets.bucket_of(number)
                self._slices[bucket.number].zero_()
                self._filled.add(bucket.number)
            self._of.having |= self._of.released

    def _drop(self) -> None:
        """Discard the reductions in flight, and ignore their errors: the next collective reports
        them.
        """
        for _ in range(len(self._flying)):
            with suppress(OffloadError):
                self._flying.finish_oldest()

    # --- from one plan to the next ----------------------------------------------------------------

    def carry(self) -> CarriedGradients:
        """Return copies of the gradients that are held here."""
        with self._lock:
            self.drain()
            return CarriedGradients(
                {number: self._slices[number].clone() for number in self._filled},
                {
                    name: [self._records[number].param for number in numbers]
                    for name, numbers in vars(self._of).items()
                },
            )

    def take_over(self, carried: CarriedGradients) -> None:
        numbers = {record.param: record.number for record in self._records}
        # A bucket of a group that was added and refused has gone.
        self._filled = carried.slices.keys() & self._slices.keys()
        for number in self._filled:
            self._slices[number].copy_(carried.slices[number])
        self._of = _ReducedParams(
            **{k: _known(params, numbers) for k, params in carried.params.items()}
        )


def _known(params: Iterable[Tensor], numbers: Mapping[Tensor, int]) -> set[int]:
    return {numbers[param] for param in params if param in numbers}
