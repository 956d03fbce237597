"""The division of memory in a simulation: the plans that `prepare` and `wrap` make for a model,
made from facts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from offload.params.device_gradients import STAGING_MOST_BYTES, STAGING_PLACES
from offload.params.spill_slots import slot_bytes
from offload.planning.layout import ELEMENT_BYTES, ParamSpec
from offload.planning.planner import (
    Plan,
    least_arena_bytes,
    least_spill_bytes,
    make_plan,
    most_numel,
)
from offload.planning.shares import (
    Shares,
    UnitSizes,
    check_device_bytes,
    share_out_sizes,
    spill_room_bytes,
)
from offload.telemetry.run_file import ParamFact
from offload.tools.forecast.workload import Budgets, Workload

_ALIGN_BYTES = 64  # of a gradient's place
_PAGE = 4096


@dataclass(frozen=True)
class Arrangement:
    """A division of memory, and what is on drives. specs: in the order of the workload's
    parameters. shares: None if the model is not prepared. spilled: numbers of the parameters whose
    gradients are spilled.
    """

    specs: tuple[ParamSpec, ...]
    sizes: UnitSizes
    shares: Shares | None
    plan: Plan
    spilled: frozenset[int]
    stored_bytes: int  # of blocks that may have to be written to the store
    has_weight_blocks: bool  # there are blocks that are read from the user's weight files

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that the engine takes."""
        return self.plan.arena_bytes if self.shares is None else self.shares.total

    @property
    def params_on_host_bytes(self) -> int:
        """The bytes of parameters that host memory has room for; 0 if the model is not prepared."""
        if self.shares is None:
            return 0
        return min(self.shares.params, sum(self.sizes.nbytes))

    @property
    def staged_chunks(self) -> int:
        """The number of chunks whose spilled gradients can be staged at once."""
        if self.shares is None or not self.spilled:
            return 0
        itemsize = {n: ELEMENT_BYTES for n in self.spilled}
        return max(1, self.shares.staging // max(1, slot_bytes(self.plan.chunks, itemsize)))

    @property
    def moves(self) -> bool:
        """Whether anything is read from drives, or written there."""
        if self.plan.disk_bytes or self.has_weight_blocks:
            return True
        shares = self.shares
        return shares is not None and bool(
            not shares.holds_all_params or shares.spilled or shares.activations
        )

    def disk_bytes(self, directories: int) -> int:
        """Return the bytes that are reserved on the drives."""
        if not directories:
            return 0
        nbytes = self.plan.disk_capacity_bytes
        if self.shares is not None:
            nbytes += self.stored_bytes + min(self.stored_bytes, self.shares.params)
            if self.shares.spilled:
                nbytes += spill_room_bytes(self.shares, self.plan.chunks)
        return nbytes


def arrange(work: Workload, budgets: Budgets, chunk_numel: int | None) -> Arrangement:
    """Divide memory within the budgets. Raises `CapacityError` with the arithmetic if they cannot
    work, as `prepare` and `wrap` do. chunk_numel: of state that goes to disk; None: derived.
    """
    specs = tuple(map(_spec, work.params))
    sizes = UnitSizes(
        tuple(unit.nbytes for unit in work.units),
        tuple(unit.needs for unit in work.units),
        frozenset(n for n, unit in enumerate(work.units) if unit.is_kept),
    )
    stored = sum(_round_up(u.nbytes, _PAGE) for u in work.units if not u.is_weight_block)
    has_disk = budgets.directories > 0
    if not work.units:
        plan = make_plan(specs, budgets.host_bytes, has_disk, disk_chunk_numel=chunk_numel)
        return Arrangement(specs, sizes, None, plan, frozenset(), 0, False)
    if budgets.device_bytes is not None:
        # The engine measures these while it runs; here they are known.
        others = work.logits_bytes
        others += work.activation_bytes if budgets.activations != "offload" else 0
        check_device_bytes(sizes.least_device_bytes, 0, others, budgets.device_bytes)
    order = sorted(range(len(specs)), key=lambda n: specs[n].unit or 0)
    gradients = [_round_up(work.params[n].grad_bytes, _ALIGN_BYTES) for n in order]
    state, least_state = _state_bytes(specs)
    shares = share_out_sizes(
        sizes,
        gradients,
        state,
        budgets.host_bytes,
        has_disk or (not stored and not state),
        budgets.activations == "offload",
        _staging_bytes(work.params) if work.device != "cpu" else 0,
        least_state,
        least_spill_bytes(specs, [fact.grad_bytes // max(fact.numel, 1) for fact in work.params]),
    )
    plan = make_plan(
        specs,
        shares.state,
        has_disk,
        disk_chunk_numel=chunk_numel,
        most_numel=most_numel(shares.staging) if shares.spilled else None,
    )
    spilled = frozenset(order[number] for number in shares.spilled)
    weight_blocks = any(unit.is_weight_block for unit in work.units)
    return Arrangement(specs, sizes, shares, plan, spilled, stored, weight_blocks)


@lru_cache(maxsize=8)  # one model is arranged within many budgets
def _state_bytes(specs: tuple[ParamSpec, ...]) -> tuple[int, int]:
    """Return the host memory for all optimizer state, and the least with which the state can pass
    through it.
    """
    return make_plan(specs, None, has_disk=False).arena_bytes, least_arena_bytes(specs)


def _spec(fact: ParamFact) -> ParamSpec:
    there = fact.element_bytes if fact.is_on_device and fact.unit is None else 0
    return ParamSpec(fact.name, fact.numel, fact.fields, there, fact.unit)


def _staging_bytes(params: Sequence[ParamFact]) -> int:
    largest = max((param.grad_bytes for param in params), default=0)
    return STAGING_PLACES * _round_up(min(largest, STAGING_MOST_BYTES), _PAGE)


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
