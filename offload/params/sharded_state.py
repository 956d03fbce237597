"""Gathers sharded optimizer state, so that a rank can read all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offload.distributed import Ranks
from offload.optim.recipe import Record
from offload.optim.source import FieldPart
from offload.planning.sharding import Sharding
from offload.planning.unit import Member, Unit


class UnitGatherer:
    """An all-gather of sharded optimizer state, one field of one unit in memory at a time. All
    ranks have state of the same parameters. records: those of the parameters with state; there may
    be more.
    """

    def __init__(
        self, ranks: Ranks, sharding: Sharding, units: Sequence[Unit], records: Sequence[Record]
    ) -> None:
        self._ranks, self._sharding = ranks, sharding
        numbers = {record.param: record.number for record in records}
        self._places: dict[int, tuple[Unit, Member]] = {}
        self._groups: list[list[int]] = []
        for unit in units:
            held = {numbers[m.param]: (unit, m) for m in unit.members if m.param in numbers}
            self._places.update(held)
            self._groups.append(list(held))

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        return self._groups

    def whole(self, field: str, own: Mapping[int, FieldPart]) -> Mapping[int, Tensor]:
        ranks, (unit, first) = self._ranks, self._places[next(iter(own))]
        size = first.dtype.itemsize
        numel = self._sharding.partition_of(unit).shard_bytes // size
        rows = torch.zeros(ranks.count, numel, dtype=torch.float32, device="cpu")
        found: dict[int, Tensor] = {}
        for number, part in own.items():
            member = self._places[number][1]
            begin = member.begin // size
            found[number] = rows.view(-1)[begin : begin + member.shape.numel()]
            found[number][part.begin : part.begin + part.values.numel()].copy_(part.values)
        ranks.gather(rows, rows[ranks.rank], f"{field} of {unit.name}").wait()
        return found
