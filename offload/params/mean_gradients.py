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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError, StateError
from offload.core.locks import uninterrupted
from offload.core.metrics import Metrics
from offload.core.pool import PIECE_ALIGN, Pool
from offload.core.ticket import Ticket, TicketState
from offload.distributed import NETWORK, Ranks
from offload.optim.gradient_handle import GradientEdit
from offload.params.gathered import Claim, Gathered, GatheredBlockMemory
from offload.params.gradients import GradMemory
from offload.params.placeholder import own_grad, set_own_grad
from offload.params.spill import SpillArea, SpilledGradientValues
from offload.planning.sharding import Sharding
from offload.planning.unit import Member, Unit

STAGING_PLACES = 2


def staging_bytes(sharding: Sharding, units: Sequence[Unit]) -> int:
    """Return the host memory for the staging buffers that gradient shards of these units pass
    through on their way from a device.
    """
    return STAGING_PLACES * (-(-_place_bytes(sharding, units) // PIECE_ALIGN) * PIECE_ALIGN)


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


@dataclass(eq=False)
class UnitSum:
    """The gradients of one unit.

    place: this rank's shard, or None if it is in the store, in `spilled`. like: a meta tensor of
    the shard's type and size.
    """

    unit: Unit
    members: dict[Tensor, Member]
    like: Tensor
    place: Tensor | None
    spilled: SpilledGradientValues | None = None
    whole: Gathered | None = None  # this rank's unsharded gradients, not reduced yet
    arrived: set[Tensor] = field(default_factory=set)  # parameters whose gradient is in `whole`
    has: set[Tensor] = field(default_factory=set)  # parameters whose gradient is in the shard
    gone: set[Tensor] = field(default_factory=set)  # those whose gradient there is invalid
    is_empty: bool = True  # the shard holds no valid gradient

    @property
    def name(self) -> str:
        return f"gradients of {self.unit.name}"


@dataclass(eq=False)
class _InFlightReduce:
    """A reduce-scatter in flight.

    target: the unit's shard itself, or memory for values to be added to it or written to the store.
    slot: the staging buffer that `target` is in, if there is one.
    """

    sum: UnitSum
    whole: Gathered
    target: Tensor
    slot: Tensor | None
    ticket: Ticket[Any]
    is_first: bool


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
        self._ranks = shard_context.ranks
        self._sharding = sharding = shard_context.sharding
        self._gather_memory = shard_context.gather_memory
        self._metrics = metrics
        self._left = left
        trained = set(params.values())
        shards = {
            unit.number: _shard_like(unit, sharding)
            for unit in units
            if any(member.param in trained for member in unit.members)
        }
        places = GradMemory(
            {n: one for n, one in shards.items() if n not in shard_context.spill}, pool
        )
        self.area = area
        self._sums = {
            number: UnitSum(
                units[number],
                {m.param: m for m in units[number].members if m.param in trained},
                shards[number],
                places.by_number.get(number),
            )
            for number in shards
        }
        self._sum_of = {param: one for one in self._sums.values() for param in one.members}
        self._touched: dict[int, None] = {}  # units that backward has reached, in order
        self._arrived: set[int] = set()  # numbers of parameters, since the latest exchange
        self._flights: deque[_InFlightReduce] = deque()
        self._is_open = False  # a backward pass has begun, and not ended
        self._is_begun = False  # there has been a backward pass
        self._early: set[int] = set()  # units that were reduced before the end of this pass
        self._late: set[int] = set()  # units that ever got a gradient after an early reduction
        self._proven: set[int] = set()  # units that were reduced early and never got one after
        self._local = 0  # how many `no_sync` are open
        self._is_pending = False  # gradients of a `no_sync` are not reduced yet
        self._local_shares: list[Claim] = []  # claims on the budget, for these gradients
        self._lock = threading.RLock()
        self._slots: list[Tensor] = []  # free staging buffers
        size = _place_bytes(sharding, [units[number] for number in shards])
        for _ in range(STAGING_PLACES if size else 0):
            with pool.lease(size, what="shards of gradients on their way") as lease:
                self._slots.append(lease.tensor())

    # --- during backward --------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a backward pass begins. End the one before first, if it broke off."""
        if self._is_open:
            self.end_backward()  # the pass before broke off
        self._is_open = self._is_begun = True

    def _end_what_broke(self) -> None:
        """Reduce the gradients of a backward pass that ended with an exception, which keeps them,
        as in torch.
        """
        if self._is_open and not self._is_in_backward():
            self.end_backward()

    @staticmethod
    def _is_in_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def arrived(self, number: int) -> None:
        """Move the gradient that autograd has computed for a parameter to the unit's buffer."""
        param = self._params[number]
        grad = own_grad(param)
        if grad is None:
            return
        set_own_grad(param, None)
        one = self._sum_of[param]
        _check(self.name_of(param), grad)
        with self._lock:
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
        taken = self._sharding.whole_of(one.unit)
        if self._local or self._is_pending:
            self._local_shares.append(
                self._gather_memory.take(taken, "whole gradients of no_sync()")
            )
        else:
            self._await_room(taken)
        return self._make(one)

    def _await_room(self, nbytes: int) -> None:
        while self._flights and self._busy_bytes + nbytes > self._sharding.gradient_bytes:
            self._finish_oldest()

    def _make(self, one: UnitSum) -> Gathered:
        """Allocate a unit's gradient buffer, with zeros between its members: the collective sends
        them, too.
        """
        parts = [(m.begin, m.begin + m.nbytes) for m in one.unit.members]
        return self._gather_memory.make(
            self._sharding.partition_of(one.unit).padded_bytes, one.name, parts
        )

    @property
    def _busy_bytes(self) -> int:
        held = sum(one.whole.taken_bytes for one in self._sums.values() if one.whole is not None)
        return held + sum(flight.whole.taken_bytes for flight in self._flights)

    def visited(self, unit: Unit) -> None:
        """Note that backward has reached a unit, and reduce the units that are complete: those that
        backward is not expected to reach again, and, if the budget is too small, others that this
        unit does not need.
        """
        if self._local:
            return
        with self._lock:
            self._touched |= {number: None for number in unit.needs if number in self._sums}
            left = self._left() | set(unit.needs)
            for number in [number for number in self._touched if number not in left]:
                if self._may_be_early(number):
                    self._early.add(number)
                    self._reduce(number)
            if self._is_pending:
                return  # their memory is claimed already
            held = sum(self._sharding.whole_of(self._sums[n].unit) for n in self._touched)
            for number in [n for n in self._touched if n not in unit.needs]:
                if held <= self._sharding.gradient_bytes:
                    break
                held -= self._sharding.whole_of(self._sums[number].unit)
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
        one = self._sums[number]
        self._touched.pop(number, None)
        whole, one.whole = one.whole, None
        if whole is None:  # this rank has no gradient of the unit
            self._await_room(self._sharding.whole_of(one.unit))
            whole = self._make(one)
        for member in one.unit.members:
            if member.param not in one.arrived:
                part_of(member, whole.use()).zero_()
        one.arrived.clear()
        target, slot = one.place, None
        if target is None or not one.is_empty:
            slot = self._take_slot()
            target = _like(one.like, slot)
        ticket = self._gather_memory.reduce(whole, target, one.name)
        self._flights.append(_InFlightReduce(one, whole, target, slot, ticket, one.is_empty))
        one.is_empty = False
        self._metrics.count("reduced_bytes", self._sharding.partition_of(one.unit).padded_bytes)

    def _take_slot(self) -> Tensor | None:
        """Take a staging buffer; if none is free, wait for the oldest reduction. Return None if the
        model is on the CPU: there are none, any memory will do.
        """
        if not self._sharding.on_device:
            return None
        while not self._slots:
            self._finish_oldest()
        return self._slots.pop()

    @uninterrupted  # except in its wait; if interrupted there, the flight stays in the queue
    def _finish_oldest(self) -> None:
        flight = self._flights[0]
        try:
            with self._metrics.span(NETWORK):
                flight.ticket.wait()
        except BaseException:
            if flight.ticket.state is TicketState.COLLECTED:  # failed, not interrupted
                self._flights.popleft()
            raise
        self._flights.popleft()
        if not flight.whole.release():
            self._metrics.count("whole_gradients_escaped")
        try:
            self._take_in_mean(flight)
        finally:
            if flight.slot is not None:
                self._slots.append(flight.slot)

    def _take_in_mean(self, flight: _InFlightReduce) -> None:
        place, one = flight.sum.place, flight.sum
        if flight.target is place:
            return
        if not flight.is_first:
            self._clear_what_is_gone(one)
        if place is not None:
            place.copy_(flight.target) if flight.is_first else place.add_(flight.target)
        elif flight.is_first:
            self._spilled(one).take(flight.target)
        else:
            self._spilled(one).add(flight.target)

    def _spilled(self, one: UnitSum) -> SpilledGradientValues:
        """Return a unit's shard in the store; allocate it there if it has none yet."""
        if one.spilled is None:
            assert self.area is not None, "made where slices are spilled"
            like = one.like
            one.spilled = self.area.make(
                one.unit.number, one.name, like.numel(), like.dtype, like.shape
            )
            assert one.spilled is not None, "each has its room"
        return one.spilled

    def cut_for(self, slices: Mapping[Tensor, Sequence[tuple[int, int]]]) -> None:
        """Cut spilled shards at the bounds by which the update will read them."""
        if self.area is None:
            return
        for one in self._sums.values():
            cuts = []
            for param, member in one.members.items():
                at = self._begin_of(one, member)
                cuts += [at + each for pair in slices.get(param, ()) for each in pair]
            self.area.cut(one.unit.number, one.like.numel(), cuts)

    def _clear_what_is_gone(self, one: UnitSum) -> None:
        """Set gradients that user code has set to None to zero, before new ones are added
        to them.
        """
        for param, member in one.members.items():
            if param in one.gone:
                self._edit(one, member, GradientEdit.of("zero_", (), {}))
        one.gone.clear()

    def end_backward(self) -> None:
        """End a backward pass: reduce all gradients that are left, so that all ranks know which
        parameters have one. All ranks must call it. Blocks.
        """
        with self._lock:
            self._is_open = False
            if self._local:
                self._is_pending = True
                self._backward_ended()
                return
            mine = sorted(n for n, one in self._sums.items() if one.whole is not None)
            each = self._ranks.exchange([sorted(self._arrived), mine], "gradients that have come")
            left = {number for _, units in each for number in units}
            self._learn(left)
            for number in sorted(left):
                self._reduce(number)
            while self._flights:
                self._finish_oldest()
            for number in {number for params, _ in each for number in params}:
                param = self._params[number]
                self._sum_of[param].has.add(param)
            self._touched.clear()
            self._arrived.clear()
            self._is_pending = False
            self._end_local()
            self._backward_ended()

    def _backward_ended(self) -> None:
        """Note that backward has ended; the subclass that shows gradients to the user overrides
        this.
        """

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
        while self._local_shares:
            self._local_shares.pop().release()

    # --- shards -----------------------------------------------------------------------------------

    def name_of(self, param: Tensor) -> str:
        one = self._sum_of.get(param)
        return one.members[param].name if one is not None else "a parameter"

    def _begin_of(self, one: UnitSum, member: Member) -> int:
        """Return the index that a parameter's first element has, or would have, in the unit's
        shard.
        """
        partition = self._sharding.partition_of(one.unit)
        begin = member.begin - partition.span(self._sharding.rank)[0]
        return begin // member.dtype.itemsize

    def _span(self, one: UnitSum, member: Member) -> tuple[int, int]:
        """Return this rank's elements of a gradient, as a range of the unit's shard."""
        partition, size = self._sharding.partition_of(one.unit), member.dtype.itemsize
        first, end = partition.own(self._sharding.rank, member.begin, member.shape.numel(), size)
        begin = self._begin_of(one, member)
        return (begin + first, begin + end) if first < end else (0, 0)

    def _own(self, one: UnitSum, member: Member) -> Tensor:
        """Return this rank's elements of a gradient: a view of the shard, or a copy if that is in
        the store.
        """
        begin, end = self._span(one, member)
        return (
            self._spilled(one).load_part(begin, end) if one.place is None else one.place[begin:end]
        )

    def _edit(self, one: UnitSum, member: Member, edit: GradientEdit) -> None:
        begin, end = self._span(one, member)
        if begin == end:
            return
        if one.place is None:
            self._spilled(one).edit(edit, begin, end)
        else:
            edit(one.place[begin:end])

    def _fill(self, one: UnitSum, member: Member, values: Tensor) -> None:
        """Set this rank's elements of a gradient to other values."""
        begin, end = self._span(one, member)
        if one.place is not None:
            one.place[begin:end].copy_(values)
        elif begin < end:
            self._spilled(one).put(values, begin)

    def _blank(self, one: UnitSum) -> None:
        """Set a unit's shard to zeros."""
        if one.place is not None:
            one.place.zero_()
        else:
            self._spilled(one).take(torch.zeros_like(one.like, device="cpu"))


def _shard_like(unit: Unit, sharding: Sharding) -> Tensor:
    """Make a meta tensor of the type and size of a rank's shard."""
    dtype = unit.members[0].dtype
    return torch.empty(sharding.shard_bytes(unit) // dtype.itemsize, dtype=dtype, device="meta")


def _like(place: Tensor, slot: Tensor | None) -> Tensor:
    """Return host memory of the same type and size, in a staging buffer if one is given."""
    if slot is None:
        return torch.empty_like(place, device="cpu")
    return slot[: place.nbytes].view(place.dtype)


def part_of(member: Member, whole: Tensor) -> Tensor:
    values = whole[member.begin : member.begin + member.nbytes].view(member.dtype)
    return values.view(member.shape)


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
