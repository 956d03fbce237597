"""The gradients of a model that is shared out over ranks, reduced to slices as backward makes them.

What autograd makes is put into one buffer for each unit, of all its elements. As soon as backward
has gone on to others and the unit is not expected again, the mean over all ranks is taken, of which
each keeps its slice; the buffer goes. That happens where all ranks come by alike: it depends on the
order of uses, not on what has arrived. What is left is reduced at the end of backward, where the
ranks tell one another which parameters have a gradient: one that has it on some ranks counts as
zero on the others, one that has it on none stays without.

Inside `no_sync` nothing is reduced: gradients of this rank add up, whole, in memory that is taken
from the budget as it is needed, and the next backward outside of it reduces the sum once.

Whole gradients are where the model computes; slices are in host memory, or in the store where that
has no room for them (`spill.py`). What comes from a device to be added to a slice, or is for one in
the store, goes to a staging place first.

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
from offload.distributed import Ranks
from offload.optim.gradient_handle import Edit
from offload.params.gathered import Claim, Gathered, GatherMemory
from offload.params.gathered_tier import NETWORK
from offload.params.gradients import GradMemory
from offload.params.placeholder import own_grad, set_own_grad
from offload.params.spill import SpillArea, Spilled
from offload.planning.sharding import Sharding
from offload.planning.unit import Member, Unit

STAGING_PLACES = 2


def staging_bytes(sharding: Sharding, units: Sequence[Unit]) -> int:
    """Host memory for slices of the gradients of these on their way from a device."""
    return STAGING_PLACES * (-(-_place_bytes(sharding, units) // PIECE_ALIGN) * PIECE_ALIGN)


def _place_bytes(sharding: Sharding, units: Sequence[Unit]) -> int:
    return max(map(sharding.slice_bytes, units), default=0) if sharding.on_device else 0


@dataclass(frozen=True)
class ShardContext:
    """Ranks that a model is shared out over. wholes: where blocks and gradients are whole. spill:
    numbers of the units whose gradients are in the store.
    """

    ranks: Ranks
    sharding: Sharding
    gather_memory: GatherMemory
    spill: frozenset[int] = frozenset()


@dataclass(eq=False)
class UnitSum:
    """The gradients of one unit. place: this rank's slice, or None where it is in the store, in
    `spilled`; like: of its type and size.
    """

    unit: Unit
    members: dict[Tensor, Member]
    like: Tensor
    place: Tensor | None
    spilled: Spilled | None = None
    whole: Gathered | None = None  # this rank's own, of all elements, not reduced yet
    arrived: set[Tensor] = field(default_factory=set)  # parameters whose gradient is in `whole`
    has: set[Tensor] = field(default_factory=set)  # parameters whose gradient is in `place`
    gone: set[Tensor] = field(default_factory=set)  # whose values there mean nothing any more
    is_empty: bool = True  # nothing in `place` means anything

    @property
    def name(self) -> str:
        return f"gradients of {self.unit.name}"


@dataclass(eq=False)
class _InFlightReduce:
    """A reduction under way. target: the place itself, or memory for what is added to it; slot: the
    staging place that it is in, if there are some.
    """

    sum: UnitSum
    whole: Gathered
    target: Tensor
    slot: Tensor | None
    ticket: Ticket[Any]
    is_first: bool


class MeanGradients:
    """Of one model. params: those that autograd tells of, by number. pool: memory for slices that
    are not spilled. area: where the others are. left: numbers of the units that backward will still
    reach.
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
        slices = {
            unit.number: _slice_like(unit, sharding)
            for unit in units
            if any(member.param in trained for member in unit.members)
        }
        places = GradMemory(
            {n: one for n, one in slices.items() if n not in shard_context.spill}, pool
        )
        self.area = area
        self._sums = {
            number: UnitSum(
                units[number],
                {m.param: m for m in units[number].members if m.param in trained},
                slices[number],
                places.by_number.get(number),
            )
            for number in slices
        }
        self._sum_of = {param: one for one in self._sums.values() for param in one.members}
        self._touched: dict[int, None] = {}  # units that backward has reached, in order
        self._arrived: set[int] = set()  # numbers of parameters, since the ranks last told
        self._flights: deque[_InFlightReduce] = deque()
        self._is_open = False  # a backward pass has begun, and not ended
        self._is_begun = False  # there has been one
        self._early: set[int] = set()  # units that were reduced before the end of this pass
        self._late: set[int] = set()  # units that something came for after that, once
        self._proven: set[int] = set()  # units that nothing did
        self._local = 0  # how many `no_sync` are open
        self._is_pending = False  # there are gradients of one that are not reduced
        self._local_shares: list[Claim] = []  # of the budget, for what they keep
        self._lock = threading.RLock()
        self._slots: list[Tensor] = []  # staging places that are free
        size = _place_bytes(sharding, [units[number] for number in slices])
        for _ in range(STAGING_PLACES if size else 0):
            with pool.lease(size, what="slices of gradients on their way") as lease:
                self._slots.append(lease.tensor())

    # --- during backward --------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass begins."""
        if self._is_open:
            self.settle()  # of the one before, which broke off
        self._is_open = self._is_begun = True

    def _end_what_broke(self) -> None:
        """A backward pass that ended with an exception leaves gradients, as torch's does."""
        if self._is_open and not self._is_in_backward():
            self.settle()

    @staticmethod
    def _is_in_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def arrived(self, number: int) -> None:
        """Autograd has made a parameter's gradient."""
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
        """Memory for all gradients of a unit; those under way are waited for if there is none."""
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
        """What lies between members is sent, too."""
        parts = [(m.begin, m.begin + m.nbytes) for m in one.unit.members]
        return self._gather_memory.make(
            self._sharding.slices(one.unit).padded_bytes, one.name, parts
        )

    @property
    def _busy_bytes(self) -> int:
        held = sum(one.whole.taken_bytes for one in self._sums.values() if one.whole is not None)
        return held + sum(flight.whole.taken_bytes for flight in self._flights)

    def visited(self, unit: Unit) -> None:
        """Backward has reached a unit. Reduce what is complete, as far as can be foreseen."""
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
                return  # their memory was taken already
            held = sum(self._sharding.whole_of(self._sums[n].unit) for n in self._touched)
            for number in [n for n in self._touched if n not in unit.needs]:
                if held <= self._sharding.gradient_bytes:
                    break
                held -= self._sharding.whole_of(self._sums[number].unit)
                self._reduce(number)

    def _may_be_early(self, number: int) -> bool:
        """Not where something came afterwards: two means are rounded twice. After `no_sync` only
        where that has never been.
        """
        return number not in self._late and (not self._is_pending or number in self._proven)

    def _learn(self, left: set[int]) -> None:
        """What was reduced early, and what something came for afterwards, on any rank."""
        self._late |= self._early & left
        self._proven = (self._proven | self._early) - self._late
        self._early.clear()

    def _reduce(self, number: int) -> None:
        """Start the reduction of a unit's gradients; all ranks do so now."""
        one = self._sums[number]
        self._touched.pop(number, None)
        whole, one.whole = one.whole, None
        if whole is None:  # nothing has come on this rank
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
        self._metrics.count("reduced_bytes", self._sharding.slices(one.unit).padded_bytes)

    def _take_slot(self) -> Tensor | None:
        """A staging place, of which the oldest is waited for if there is none; None: there never
        are, any memory will do.
        """
        if not self._sharding.on_device:
            return None
        while not self._slots:
            self._finish_oldest()
        return self._slots.pop()

    @uninterrupted  # but for its wait, after which it is the oldest still
    def _finish_oldest(self) -> None:
        flight = self._flights[0]
        try:
            with self._metrics.span(NETWORK):
                flight.ticket.wait()
        except BaseException:
            if flight.ticket.state is TicketState.COLLECTED:  # it has failed
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

    def _spilled(self, one: UnitSum) -> Spilled:
        """A unit's slice in the store."""
        if one.spilled is None:
            assert self.area is not None, "made where slices are spilled"
            like = one.like
            one.spilled = self.area.make(
                one.unit.number, one.name, like.numel(), like.dtype, like.shape
            )
            assert one.spilled is not None, "each has its room"
        return one.spilled

    def cut_for(self, slices: Mapping[Tensor, Sequence[tuple[int, int]]]) -> None:
        """Cut spilled slices as the update will ask for them."""
        if self.area is None:
            return
        for one in self._sums.values():
            cuts = []
            for param, member in one.members.items():
                at = self._begin_of(one, member)
                cuts += [at + each for pair in slices.get(param, ()) for each in pair]
            self.area.cut(one.unit.number, one.like.numel(), cuts)

    def _clear_what_is_gone(self, one: UnitSum) -> None:
        """Gradients that somebody has set to None count as zero from now on."""
        for param, member in one.members.items():
            if param in one.gone:
                self._edit(one, member, Edit.of("zero_", (), {}))
        one.gone.clear()

    def settle(self) -> None:
        """A backward pass is over: all gradients are reduced, all ranks know which there are."""
        with self._lock:
            self._is_open = False
            if self._local:
                self._is_pending = True
                self._settled()
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
            self._settled()

    def _settled(self) -> None:
        """For whoever shows them to others."""

    # --- without reduction ------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank alone; the next one outside
        reduces the sum, once. All ranks do so.
        """
        self._local += 1
        try:
            yield
        finally:
            self._local -= 1

    def _end_local(self) -> None:
        while self._local_shares:
            self._local_shares.pop().release()

    # --- where they are ---------------------------------------------------------------------------

    def name_of(self, param: Tensor) -> str:
        one = self._sum_of.get(param)
        return one.members[param].name if one is not None else "a parameter"

    def _begin_of(self, one: UnitSum, member: Member) -> int:
        """Where a parameter's first element would be in the unit's slice."""
        slices = self._sharding.slices(one.unit)
        begin = member.begin - slices.span(self._sharding.rank)[0]
        return begin // member.dtype.itemsize

    def _span(self, one: UnitSum, member: Member) -> tuple[int, int]:
        """This rank's elements of a gradient, in the unit's slice."""
        slices, size = self._sharding.slices(one.unit), member.dtype.itemsize
        first, end = slices.own(self._sharding.rank, member.begin, member.shape.numel(), size)
        begin = self._begin_of(one, member)
        return (begin + first, begin + end) if first < end else (0, 0)

    def _own(self, one: UnitSum, member: Member) -> Tensor:
        """Those elements: where they are, or a copy of what is in the store."""
        begin, end = self._span(one, member)
        return (
            self._spilled(one).load_part(begin, end) if one.place is None else one.place[begin:end]
        )

    def _edit(self, one: UnitSum, member: Member, edit: Edit) -> None:
        begin, end = self._span(one, member)
        if begin == end:
            return
        if one.place is None:
            self._spilled(one).edit(edit, begin, end)
        else:
            edit(one.place[begin:end])

    def _fill(self, one: UnitSum, member: Member, values: Tensor) -> None:
        """Give this rank's elements other values."""
        begin, end = self._span(one, member)
        if one.place is not None:
            one.place[begin:end].copy_(values)
        elif begin < end:
            self._spilled(one).put(values, begin)

    def _blank(self, one: UnitSum) -> None:
        """A unit's slice of zeros."""
        if one.place is not None:
            one.place.zero_()
        else:
            self._spilled(one).take(torch.zeros_like(one.like, device="cpu"))


def _slice_like(unit: Unit, sharding: Sharding) -> Tensor:
    """Of the type and size of a rank's slice."""
    dtype = unit.members[0].dtype
    return torch.empty(sharding.slice_bytes(unit) // dtype.itemsize, dtype=dtype, device="meta")


def _like(place: Tensor, slot: Tensor | None) -> Tensor:
    """Host memory of the same type and size, in a staging place if it is given."""
    if slot is None:
        return torch.empty_like(place, device="cpu")
    return slot[: place.nbytes].view(place.dtype)


def part_of(member: Member, whole: Tensor) -> Tensor:
    values = whole[member.begin : member.begin + member.nbytes].view(member.dtype)
    return values.view(member.shape)


def _check(name: str, grad: Tensor) -> None:
    if grad.requires_grad:
        raise StateError(
            f"{name}: backward(create_graph=True) cannot be used with ranks: gradients go to "
            "slices and have no graph there; leave create_graph out"
        )
    if grad.layout != torch.strided:
        raise ConfigError(
            f"{name}: its gradient is sparse ({grad.layout}), which cannot be reduced over ranks; "
            "make it dense: nn.Embedding(..., sparse=False)"
        )
