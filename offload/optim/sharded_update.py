"""The part of an optimizer step that needs the ranks that share its state: agreement and
collectives.

Each rank keeps the state of its own elements and updates those. Stage 1: every rank has the same
gradients, because DistributedDataParallel or the user's code has reduced them. Stage 2: they are
reduced here, and every rank keeps the slice that it needs (`reducer.py`). In both, the new values
are all-gathered while the update goes on. Before anything changes, the ranks reach consensus, so a
refusal on one rank is a refusal on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.tensors import flat
from offload.distributed.consensus import check_alike
from offload.distributed.device_network import DeviceNetwork
from offload.distributed.ranks import Ranks
from offload.optim.agreement import VALUES, settings_sum, value_facts
from offload.optim.buckets import Buckets
from offload.optim.exchange import BucketBuffer, DeviceExchange, Exchange, Gathering
from offload.optim.recipe import Record
from offload.optim.reducer import HAVING, LEFT, Reducer
from offload.optim.source import FieldPart
from offload.optim.tiers import leased
from offload.planning.state_plan import RankShare

_COMPARED_STEPS = 2  # in which all parameters and gradients are compared; later a sample of them
_SAMPLE_BYTES = 1 << 20
_REDUCE = (
    "average gradients over the ranks before step(), as DistributedDataParallel does, or have it "
    "done by wrap(..., release_grads=True), without DistributedDataParallel"
)

# Registers a function to be called with the number of each parameter whose gradient has arrived,
# and a second one for the end of a backward pass with such gradients; returns the hook handles.
WatchPasses = Callable[[Mapping[int, Tensor], Callable[[int], None], Callable[[], None]], list[Any]]


class ShardedUpdate:
    """The exchange, the reducer and the checks of one optimizer among ranks, while one plan is in
    force. network: between the devices of the parameters; None: they are in host memory.
    """

    def __init__(
        self,
        ranks: Ranks,
        buckets: Buckets,
        share: RankShare,
        records: Sequence[Record],
        pool: Pool | None,
        metrics: Metrics,
        watch: WatchPasses,
        network: DeviceNetwork | None = None,
    ) -> None:
        self.ranks, self.buckets, self.share = ranks, buckets, share
        self._records, self._metrics = records, metrics
        memory = [
            leased(pool, share.buffer_bytes, "a network buffer") for _ in range(share.buffers)
        ]
        self._is_in_host = network is None
        if network is None:
            self.exchange = self._in_host(memory)
        else:
            self.exchange = DeviceExchange(network, buckets, memory, metrics)
        self.reducer: Reducer | None = None  # None: gradients are averaged elsewhere
        self._hooks: list[Any] = []
        if share.grad_bytes:
            memory_of_grads = leased(pool, share.grad_bytes, "gradients of our own")
            self.reducer = Reducer(self.exchange, records, memory_of_grads)
            params = {number: records[number].param for number in buckets.numbers}
            self._hooks = watch(params, self.reducer.arrived, self.reducer.ended)
        self._gathering: Gathering | None = None
        self._left: Counter[int] = Counter()  # own elements of each bucket, not updated yet

    def _in_host(self, memory: Sequence[Tensor]) -> Exchange:
        buffers = [BucketBuffer.in_host(one, self.buckets) for one in memory]
        return Exchange(self.ranks, self.buckets, buffers, self._metrics)

    # --- before a step ----------------------------------------------------------------------------

    def look(self, grads: Mapping[int, Tensor], steps_done: int) -> dict[str, Any]:
        """Return what this rank tells the others about a step with these gradients, or with those
        that are reduced here.
        """
        params = {number: flat(self._records[number].param) for number in self.buckets.numbers}
        facts = {
            "which parameters there are": self.buckets.digest,
            "their hyper-parameters": settings_sum(self._records),
            **self._sums(VALUES, params, steps_done),
        }
        if self.reducer is not None:
            return {**facts, **self.reducer.look()}
        sums = self._sums("the gradient of", grads, steps_done)
        return {**facts, "which of them have gradients": list(grads), **sums}

    def _sums(self, what: str, tensors: Mapping[int, Tensor], steps_done: int) -> dict[str, str]:
        """Return checksums by name: of all tensors in the first steps, later of the first MiB of
        one of them, another one each step.
        """
        values = [(self._records[number].name, one) for number, one in tensors.items()]
        if steps_done >= _COMPARED_STEPS and values:
            name, one = values[steps_done % len(values)]
            values = [(name, one[: _SAMPLE_BYTES // one.element_size()])]
        return value_facts(what, dict(values))

    def settle(
        self, grads: dict[int, Tensor], said: Sequence[Mapping[str, Any]]
    ) -> dict[int, Tensor]:
        """Compare what all ranks have said, and return the gradients for a step. Raises
        `StateError` where they differ.
        """
        own = (HAVING, LEFT) if self.reducer is not None else ()  # which may differ
        facts = [{k: v for k, v in one.items() if k not in own} for one in said]
        check_alike("step", facts, self._remedy, StateError)
        return grads if self.reducer is None else self.reducer.settle(said)

    def _remedy(self, name: str) -> str:
        if "gradient" in name and self.reducer is None:
            return _REDUCE
        return "every rank must make the same model and optimizer, and change them alike"

    # --- new values of parameters -----------------------------------------------------------------

    def begin_update(self, numbers: Iterable[int]) -> None:
        """Begin the update of these parameters, on all ranks."""
        stepping = {n for n in numbers if self.buckets.own(n) is not None}
        self._left.clear()
        for number in stepping:
            begin, end = self.buckets.own(number) or (0, 0)
            self._left[self.buckets.bucket_of(number).number] += end - begin
        wanted = {self.buckets.bucket_of(number).number for number in stepping}
        self._gathering = Gathering(
            self.exchange,
            [b for b in self.buckets.in_order_of_update if b.number in wanted],
            lambda number: flat(self._records[number].param) if number in stepping else None,
            "the new values",
            is_ready=lambda bucket: not self._left[bucket.number],
        )

    def updated(self, number: int, numel: int) -> None:
        """Note that so many of a parameter's own elements have their new values, or will have them
        on their device before anything that `advance` starts.
        """
        if self.buckets.own(number) is not None:
            self._left[self.buckets.bucket_of(number).number] -= numel

    def advance(self) -> None:
        """Send the buckets that are complete, while buffers are free. Does not block."""
        if self._gathering is not None:
            self._gathering.advance()

    def end_update(self) -> None:
        """Wait until this rank has the new values of all ranks."""
        assert self._gathering is not None, "begun before"
        self._gathering.finish()
        self._gathering = None
        if self.reducer is not None:
            self.reducer.used()

    def break_off(self, error: BaseException) -> None:
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.break_off(error)

    # --- gradients that are here only ------------------------------------------------------------

    def return_gradients(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Gather the averaged gradients and give them to the parameters, whole. said: what each
        rank has told about its gradients.
        """
        assert self.reducer is not None, "gradients are reduced here"
        whole: dict[int, Tensor] = {}
        for number, own in self.reducer.settle(said).items():
            record = self._records[number]
            record.param.grad = grad = torch.empty_like(record.param, requires_grad=False)
            whole[number] = flat(grad)
            first, end = self.buckets.own(number) or (0, 0)
            whole[number][first:end].copy_(own)
        wanted = {self.buckets.bucket_of(n).number for n in whole if self.buckets.own(n)}
        Gathering(
            self.exchange,
            [bucket for bucket in self.buckets.each if bucket.number in wanted],
            whole.get,
            "the gradients",
        ).finish()
        self.reducer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Remove the hooks on gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- whole states -----------------------------------------------------------------------------

    def gatherer(self) -> BucketGatherer:
        """Make a gatherer for an export of the state. It works in host memory, outside of any
        budget.
        """
        if self.reducer is not None:
            self.reducer.drain()
        exchange = self.exchange
        if not self._is_in_host:
            size, count = self.buckets.whole_bytes, self.share.buffers
            memory = torch.empty(count, size, dtype=torch.uint8, device="cpu")
            exchange = self._in_host(list(memory))
        return BucketGatherer(exchange, self._records)


class BucketGatherer:
    """A gatherer that all-gathers the state of one bucket's parameters, one field at a time."""

    def __init__(self, exchange: Exchange, records: Sequence[Record]) -> None:
        self._exchange, self._records = exchange, records

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        buckets = self._exchange.buckets
        found: dict[int, list[int]] = {bucket.number: [] for bucket in buckets.each}
        for number in buckets.numbers:
            found[buckets.bucket_of(number).number].append(number)
        return list(found.values())

    def whole(self, field: str, own: Mapping[int, FieldPart]) -> Mapping[int, Tensor]:
        wholes: dict[int, Tensor] = {}
        for number, part in own.items():
            numel = self._records[number].shape.numel()
            wholes[number] = torch.empty(numel, dtype=torch.float32, device="cpu")
            wholes[number][part.begin : part.begin + part.values.numel()].copy_(part.values)
        bucket = self._exchange.buckets.bucket_of(next(iter(own)))
        what = f"{field} of the state"
        Gathering(self._exchange, [bucket], wholes.get, what, dtype=torch.float32).finish()
        return wholes
