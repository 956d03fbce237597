"""Optimizer state of which each rank has slices, put together for whoever wants all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.layout import MASTER
from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.shard import Ranks
from offload.sharding import Sharding
from offload.units import Member, Unit


def complete(
    ranks: Ranks,
    sharding: Sharding,
    units: Sequence[Unit],
    records: Sequence[Record],
    states: Mapping[int, Mapping[str, Any]],
) -> None:
    """Fill in what other ranks have of these states, by number, which have this rank's elements.
    One unit's field at a time is in memory whole. All ranks have state of the same parameters.
    """
    numbers = {record.param: record.number for record in records}
    for unit in units:
        held = [m for m in unit.members if numbers.get(m.param, -1) in states]
        fields = dict.fromkeys(
            name for m in held for name in (*records[numbers[m.param]].fields, MASTER)
        )
        for field in fields:
            targets = [
                (m, flat(states[numbers[m.param]][field]))
                for m in held
                if isinstance(states[numbers[m.param]].get(field), Tensor)
            ]
            if targets:
                _complete(ranks, sharding, unit, targets, f"{field} of {unit.name}")


def _complete(
    ranks: Ranks,
    sharding: Sharding,
    unit: Unit,
    targets: Sequence[tuple[Member, Tensor]],
    what: str,
) -> None:
    slices, size = sharding.slices(unit), unit.members[0].dtype.itemsize
    numel = slices.slice_bytes // size
    whole = torch.zeros(ranks.count, numel, dtype=torch.float32, device="cpu")
    mine = whole.view(-1)
    for member, values in targets:
        first, end = slices.own(ranks.rank, member.begin, member.shape.numel(), size)
        begin = member.begin // size
        mine[begin + first : begin + end].copy_(values[first:end])
    ranks.gather(whole, whole[ranks.rank], what).wait()
    for member, values in targets:
        begin = member.begin // size
        values.copy_(mine[begin : begin + member.shape.numel()])
