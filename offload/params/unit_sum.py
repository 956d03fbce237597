"""This rank's shard of the gradients of one unit, in host memory or in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.optim.gradient_source import Gradient, GradientEdit
from offload.params.gathered import Gathered
from offload.params.spill import SpillArea
from offload.params.spilled_gradient import SpilledGradientValues
from offload.planning.sharding import Sharding
from offload.planning.unit import Member, Unit


@dataclass(eq=False)
class UnitSum:
    """The gradients of one unit.

    like: a meta tensor of the shard's type and size. place: this rank's shard; None: it is in the
    store, in `area`.
    """

    unit: Unit
    members: dict[Tensor, Member]
    sharding: Sharding
    like: Tensor
    place: Tensor | None
    area: SpillArea | None
    whole: Gathered | None = None  # this rank's unsharded gradients, not reduced yet
    arrived: set[Tensor] = field(default_factory=set)  # parameters whose gradient is in `whole`
    has: set[Tensor] = field(default_factory=set)  # parameters whose gradient is in the shard
    gone: set[Tensor] = field(default_factory=set)  # those whose gradient there is invalid
    is_empty: bool = True  # the shard holds no valid gradient
    _spilled: SpilledGradientValues | None = None

    @property
    def name(self) -> str:
        return f"gradients of {self.unit.name}"

    @property
    def spilled(self) -> SpilledGradientValues:
        """The shard in the store, which is allocated there if it has no room yet."""
        if self._spilled is None:
            assert self.area is not None, "made where slices are spilled"
            self._spilled = SpilledGradientValues.make(
                self.area, self.unit.number, self.name, self.like
            )
            assert self._spilled is not None, "each has its room"
        return self._spilled

    def cut_for(self, slices: Mapping[Tensor, Sequence[tuple[int, int]]]) -> None:
        """Cut a spilled shard at the bounds by which the update will read it."""
        if self.area is not None:
            cuts = [
                self._begin_of(param) + each
                for param in self.members
                for pair in slices.get(param, ())
                for each in pair
            ]
            self.area.cut(self.unit.number, self.like.numel(), cuts)

    def _begin_of(self, param: Tensor) -> int:
        """Return the index that a parameter's first element has, or would have, in the shard."""
        member = self.members[param]
        begin = member.begin - self.sharding.partition_of(self.unit).span(self.sharding.rank)[0]
        return begin // member.dtype.itemsize

    def span(self, param: Tensor) -> tuple[int, int]:
        """Return this rank's elements of a gradient, as a range of the shard."""
        first, end = self.sharding.own(self.unit, param)
        begin = self._begin_of(param)
        return (begin + first, begin + end) if first < end else (0, 0)

    def own(self, param: Tensor) -> Tensor:
        """Return this rank's elements of a gradient: a view of the shard, or a copy if that is in
        the store.
        """
        begin, end = self.span(param)
        return (
            self.place[begin:end] if self.place is not None else self.spilled.load_part(begin, end)
        )

    def input(self, param: Tensor) -> Gradient:
        """Return the same elements for the update."""
        begin, end = self.span(param)
        if self.place is not None or begin == end:
            return self.own(param)
        return self.spilled.part(begin, end)

    def edit(self, param: Tensor, edit: GradientEdit) -> None:
        begin, end = self.span(param)
        if begin == end:
            return
        if self.place is None:
            self.spilled.edit(edit, begin, end)
        else:
            edit(self.place[begin:end])

    def fill(self, param: Tensor, whole: Tensor) -> None:
        """Set this rank's elements of a gradient to those of other values."""
        first, last = self.sharding.own(self.unit, param)
        values = whole.reshape(-1)[first:last].to(self.like.dtype)
        begin, end = self.span(param)
        if self.place is not None:
            self.place[begin:end].copy_(values)
        elif begin < end:
            self.spilled.put(values, begin)

    def drop(self, param: Tensor) -> None:
        """Drop a parameter's gradient, reduced or not."""
        self.arrived.discard(param)
        if not self.arrived and self.whole is not None:
            self.whole.release()
            self.whole = None
        self.has.discard(param)
        self.gone.add(param)
        if not self.has:
            self.is_empty = True
            self.gone.clear()

    def clear_what_is_gone(self) -> None:
        """Set gradients that user code has set to None to zero, before new ones are added to
        them.
        """
        for param in self.members:
            if param in self.gone:
                self.edit(param, GradientEdit.of("zero_", (), {}))
        self.gone.clear()

    def take_in(self, mean: Tensor, is_first: bool) -> None:
        """Take in a mean that is not in the shard's own memory: the first, or one to add."""
        if not is_first:
            self.clear_what_is_gone()
        if self.place is not None:
            self.place.copy_(mean) if is_first else self.place.add_(mean)
        elif is_first:
            self.spilled.take(mean)
        else:
            self.spilled.add(mean)


def shard_like(unit: Unit, sharding: Sharding) -> Tensor:
    """Make a meta tensor of the type and size of a rank's shard."""
    dtype = unit.members[0].dtype
    return torch.empty(sharding.shard_bytes(unit) // dtype.itemsize, dtype=dtype, device="meta")


def part_of(member: Member, whole: Tensor) -> Tensor:
    values = whole[member.begin : member.begin + member.nbytes].view(member.dtype)
    return values.view(member.shape)
