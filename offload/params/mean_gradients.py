"""The gradients of a sharded model, reduce-scattered to shards while backward computes them.

The gradients of a unit go to one buffer of all its elements. As soon as backward has gone on to
other units and the unit is not expected again, a reduce-scatter takes the mean over all ranks, each
rank keeps its shard, and the buffer is freed. The ranks start it at the same points of backward: it
depends on the order of uses, not on which gradients have arrived. The rest is reduced at the end of
backward, where the ranks tell one another which parameters have a gradient: a gradient that exists
on some ranks only counts as zero on the others, one that exists on none stays None.

Inside `no_sync` nothing is reduced: gradients of this rank accumulate, unsharded, in memory that is
taken from the budget as needed, and the next backward outside of it reduces the sum once.

Unsharded gradients are where the model computes; shards are in host memory, or spilled to the store
if host memory has no room for them (`spill.py`). What a device sends to be added to a shard, or for
a shard in the store, goes through a staging buffer.

Autograd calls `arrived` from its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError, StateError
from offload.core.in_flight import InFlight
from offload.core.metrics import Metrics
from offload.core.pool import PIECE_ALIGN, Pool
from offload.core.ticket import Ticket
from offload.distributed.consensus import NETWORK
from offload.distributed.ranks import Ranks
from offload.params.gathered import Gathered, GatheredBlockMemory, Release
from offload.params.gradients import gradient_memory
from offload.params.placeholder import own_grad, set_own_grad
from offload.params.spill import SpillArea
from offload.params.unit_sum import UnitSum, part_of, shard_like
from offload.planning.layout import round_up
from offload.planning.sharding import Sharding
from offload.planning.unit import Unit

STAGING_PLACES = 2


def staging_bytes(sharding: Sharding, units: Sequence[Unit]) -> int:
    """Return the host memory for the staging buffers that gradient shards of these units pass
    through on their way from a device.
    """
    return STAGING_PLACES * round_up(_place_bytes(sharding, units), PIECE_ALIGN)


def _place_bytes(sharding: Sharding, units: Sequence[Unit]) -> int:
    return max(map(sharding.shard_bytes, units), default=0) if sharding.on_device else 0


@dataclass(frozen=True)
class ShardContext:
    """The ranks that a model is sharded over, and how.

    gather_memory: allocates gathered blocks and unsharded gradients. spill: numbers of the units
    whose gradients are in the store.
    """

    ranks: Ranks
    sharding: Sharding
    gather_memory: GatheredBlockMemory
    spill: frozenset[int] = frozenset()


class MeanGradients:
    """The gradients of one sharded model, averaged over its ranks.

    params: the parameters that autograd's hooks report, by number. pool: memory for shards that are
    not spilled. area: where the other shards are. left: returns the numbers of the units that
    backward will still reach.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        params: Mapping[int, Tensor],
        shard_context: ShardContext,
        pool: Pool,
        metrics: Metrics,
        left: Callable[[], set[int]],
        area: SpillArea | None = None,
    ) -> None:
        self._params = params
        self.area = area
        self.ranks = shard_context.ranks
        self.sharding = sharding = shard_context.sharding
        self._gather_memory = shard_context.gather_memory
        self._metrics = metrics
        self._left = left
        trained = set(params.values())
        shards = {
            unit.number: shard_like(unit, sharding)
            for unit in units
            if any(member.param in trained for member in unit.members)
        }
        here = {n: one for n, one in shards.items() if n not in shard_context.spill}
        places = gradient_memory(here, pool)
        self.sums = {
            number: UnitSum(
                units[number],
                {m.param: m for m in units[number].members if m.param in trained},
                sharding,
                shards[number],
                places.get(number),
                area,
            )
            for number in shards
        }
        self.sum_of = {param: one for one in self.sums.values() for param in one.members}
        self._touched: dict[int, None] = {}  # units that backward has reached, in order
        self._arrived: set[int] = set()  # numbers of parameters, since the latest exchange
        self._flights: InFlight[Gathered] = InFlight(self._await)
        self._is_open = False  # a backward pass has begun, and not ended
        self._is_begun = False  # there has been a backward pass
        self._early: set[int] = set()  # units that were reduced before the end of this pass
        self._late: set[int] = set()  # units that ever got a gradient after an early reduction
        self._proven: set[int] = set()  # units that were reduced early and never got one after
        self._local = 0  # how many `no_sync` are open
        self._is_pending = False  # gradients of a `no_sync` are not reduced yet
        self._local_claims: list[Release] = []  # of the budget, for these gradients
        self.lock = threading.RLock()
        self._slots: list[Tensor] = []  # free staging buffers
        size = _place_bytes(sharding, [units[number] for number in shards])
        for _ in range(STAGING_PLACES if size else 0):
            self._slots.append(pool.lease(size, what="shards of gradients on their way").tensor())

    # --- during backward --------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a backward pass begins. End the one before first, if it broke off."""
        if self._is_open:
            self.end_backward()  # the pass before broke off
        self._is_open = self._is_begun = True

    def end_what_broke(self) -> None:
        """Reduce the gradients of a backward pass that ended with an exception, which keeps them,
        as in torch.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        if self._is_open and not is_in_backward:
            self.end_backward()

    def arrived(self, number: int) -> None:
        """Move the gradient that autograd has computed for a parameter to the unit's buffer."""
        param = self._params[number]
        grad = own_grad(param)
        if grad is None:
            return
        set_own_grad(param, None)
        one = self.sum_of[param]
        _check(self.name_of(param), grad)
        with self.lock:
            if one.whole is None:
                one.whole = self._room_for(one)
            place = part_of(one.members[param], one.whole.use())
            if param in one.arrived:
                place.add_(grad)
            else:
                place.copy_(grad)
            one.arrived.add(param)
            self._arrived.add(number)

    def _room_for(self, one: UnitSum) -> Gathered:
        """Allocate memory for all gradients of a unit. Waits for reductions in flight while the
        budget has no room; inside `no_sync`, and until its sum is reduced, takes more of the budget
        instead.
        """
        taken = self.sharding.whole_of(one.unit)
        if self._local or self._is_pending:
            self._local_claims.append(
                self._gather_memory.take(taken, "whole gradients of no_sync()")
            )
        else:
            self._await_room(taken)
        return self._make(one)

    def _await_room(self, nbytes: int) -> None:
        """Wait for reductions in flight while the budget has no room for `nbytes` more."""
        held = sum(one.whole.taken_bytes for one in self.sums.values() if one.whole is not None)
        most = self.sharding.gradient_bytes - held - nbytes
        while self._flights and sum(whole.taken_bytes for whole in self._flights.owners) > most:
            self._flights.finish_oldest()

    def _make(self, one: UnitSum) -> Gathered:
        """Allocate a unit's gradient buffer, with zeros between its members: the collective sends
        them, too.
        """
        parts = [(m.begin, m.begin + m.nbytes) for m in one.unit.members]
        return self._gather_memory.make(
            self.sharding.partition_of(one.unit).padded_bytes, one.name, parts
        )

    def visited(self, unit: Unit) -> None:
        """Note that backward has reached a unit, and reduce the units that are complete: those that
        backward is not expected to reach again, and, if the budget is too small, others that this
        unit does not need.
        """
        if self._local:
            return
        with self.lock:
            self._touched |= {number: None for number in unit.needs if number in self.sums}
            left = self._left() | set(unit.needs)
            for number in [number for number in self._touched if number not in left]:
                if self._may_be_early(number):
                    self._early.add(number)
                    self._reduce(number)
            if self._is_pending:
                return  # their memory is claimed already
            held = sum(self.sharding.whole_of(self.sums[n].unit) for n in self._touched)
            for number in [n for n in self._touched if n not in unit.needs]:
                if held <= self.sharding.gradient_bytes:
                    break
                held -= self.sharding.whole_of(self.sums[number].unit)
                self._reduce(number)

    def _may_be_early(self, number: int) -> bool:
        """Return whether a unit may be reduced before the end of backward. Not if it ever got a
        gradient after an early reduction: a sum of two means is rounded twice. After `no_sync` only
        if it has been reduced early and never got one.
        """
        return number not in self._late and (not self._is_pending or number in self._proven)

    def _learn(self, left: set[int]) -> None:
        """Note which units were reduced early, and which of them got a gradient afterwards on any
        rank (`left`).
        """
        self._late |= self._early & left
        self._proven = (self._proven | self._early) - self._late
        self._early.clear()

    def _reduce(self, number: int) -> None:
        """Start the reduce-scatter of a unit's gradients. All ranks do so at the same point."""
        one = self.sums[number]
        self._touched.pop(number, None)
        whole, one.whole = one.whole, None
        if whole is None:  # this rank has no gradient of the unit
            self._await_room(self.sharding.whole_of(one.unit))
            whole = self._make(one)
        for member in one.unit.members:
            if member.param not in one.arrived:
                part_of(member, whole.use()).zero_()
        one.arrived.clear()
        target, slot = one.place, None
        if target is None or not one.is_empty:
            slot = self._take_slot(one.like.nbytes)
            target = slot[: one.like.nbytes].view(one.like.dtype)
        ticket = self._gather_memory.reduce(whole, target, one.name)
        take_in = partial(self._take_in, one, whole, target, one.is_empty)
        self._flights.add(ticket, take_in, partial(self._free, slot), whole)
        one.is_empty = False
        self._metrics.count("reduced_bytes", self.sharding.partition_of(one.unit).padded_bytes)

    def _take_slot(self, nbytes: int) -> Tensor:
        """Take a staging buffer; if none is free, wait for the oldest reduction. A model on the CPU
        has none: any memory will do.
        """
        if not self.sharding.on_device:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        while not self._slots:
            self._flights.finish_oldest()
        return self._slots.pop()

    def _await(self, ticket: Ticket[Any]) -> None:
        with self._metrics.span(NETWORK):
            ticket.wait()

    def _take_in(self, one: UnitSum, whole: Gathered, target: Tensor, is_first: bool) -> None:
        """Take in a mean. target: the unit's shard itself, or memory for values to be added to it
        or written to the store.
        """
        if not whole.release():
            self._metrics.count("whole_gradients_escaped")
        if target is not one.place:
            one.take_in(target, is_first)

    def _free(self, slot: Tensor | None) -> None:
        if slot is not None and self.sharding.on_device:
            self._slots.append(slot)

    def cut_for(self, slices: Mapping[Tensor, Sequence[tuple[int, int]]]) -> None:
        """Cut spilled shards at the bounds by which the update will read them."""
        for one in self.sums.values():
            one.cut_for(slices)

    def end_backward(self) -> None:
        """End a backward pass: reduce all gradients that are left, so that all ranks know which
        parameters have one. All ranks must call it. Blocks.
        """
        with self.lock:
            self._is_open = False
            if self._local:
                self._is_pending = True
                self.ended()
                return
            mine = sorted(n for n, one in self.sums.items() if one.whole is not None)
            each = self.ranks.exchange([sorted(self._arrived), mine], "gradients that have come")
            left = {number for _, units in each for number in units}
            self._learn(left)
            for number in sorted(left):
                self._reduce(number)
            self._flights.finish()
            for number in {number for params, _ in each for number in params}:
                param = self._params[number]
                self.sum_of[param].has.add(param)
            self._touched.clear()
            self._arrived.clear()
            self._is_pending = False
            self._end_local()
            self.ended()

    def ended(self) -> None:
        """Note that a backward pass has ended: subclasses show its gradients."""

    # --- no_sync ----------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add to the gradients of this rank alone while the block runs; the
        next one outside of it reduces the sum, once. All ranks must do the same.
        """
        self._local += 1
        try:
            yield
        finally:
            self._local -= 1

    def _end_local(self) -> None:
        while self._local_claims:
            self._local_claims.pop()()

    def close(self, give_back: Callable[[UnitSum, Tensor], None]) -> None:
        """Drop all gradients, after `give_back` has been called with each unit's, gathered from all
        ranks, if there are any.
        """
        with self.lock:
            self._local = 0
            if not self.ranks.is_broken and self._is_begun:
                self.end_backward()
                for one in self.sums.values():
                    if one.has:
                        give_back(one, self._gathered(one))
            for one in self.sums.values():
                if one.whole is not None:
                    one.whole.release()
            self._slots.clear()
            self.sums.clear()  # autograd graphs that are still alive refer to this object
            self.sum_of.clear()
            self._end_local()

    def _gathered(self, one: UnitSum) -> Tensor:
        """Return a unit's gradients, gathered from all ranks, as bytes."""
        mine = one.spilled.load() if one.place is None else one.place
        padded = self.sharding.partition_of(one.unit).padded_bytes // mine.element_size()
        whole = torch.empty(padded, dtype=mine.dtype, device="cpu")
        self.ranks.gather(whole, mine, one.name).wait()
        return whole.view(torch.uint8)

    def name_of(self, param: Tensor) -> str:
        one = self.sum_of.get(param)
        return one.members[param].name if one is not None else "a parameter"


def _check(name: str, grad: Tensor) -> None:
    if grad.requires_grad:
        raise StateError(
            f"{name}: backward(create_graph=True) cannot be used with ranks: gradients become "
            "shards and have no graph there; leave create_graph out"
        )
    if grad.layout != torch.strided:
        raise ConfigError(
            f"{name}: its gradient is sparse ({grad.layout}), which cannot be reduced over ranks; "
            "make it dense: nn.Embedding(..., sparse=False)"
        )
