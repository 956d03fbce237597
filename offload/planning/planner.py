"""The planner of optimizer state: from facts and budgets to the plan. A pure function.

Nothing is allocated and nothing is measured here. What fits stays in host memory, the rest passes
through a few buffers; where that cannot work it is refused with the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.planning.layout import (
    CHUNK_NUMEL,
    ELEMENT_BYTES,
    Chunk,
    ParamSpec,
    lay_out,
    layout_size,
    round_up,
)
from offload.planning.sharding import Sharding
from offload.planning.state_plan import UNKNOWN, Plan, RankShare, Speeds, largest_staging_buffer
from offload.planning.unit import NO_UNITS, UnitSizes

BUFFERS = 16  # chunks in flight: some being read, one updated, some written
DISK_CHUNK_NUMEL = 1 << 20  # less to wait for where a step begins and ends
LEAST_BUFFERS = 2
STAGING_BUFFERS = 3  # of device parameters: one is downloaded, one updated, one uploaded
LEAST_CHUNK_NUMEL = 16 << 10
_CHUNKS_STAGED = 4  # with gradients read from disk, where there is memory for more than one
_LINE = 64


@dataclass(frozen=True)
class Budgets:
    """The budgets of a training. None: no limit.

    directories: how many on drives; 0: there is no disk. activations: keep, recompute or offload.
    held_bytes: what other optimizers hold beside it, for the message. chunk_numel: elements of a
    chunk that goes to disk, if the budget has room for its buffers; None: 1 Mi. most_chunk_numel:
    of any chunk. joined_numel: a forecast, which needs sums only, has neighbouring chunks laid out
    as one of about so many elements.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None
    directories: int = 1
    activations: str = "keep"
    held_bytes: int = 0
    chunk_numel: int | None = None
    most_chunk_numel: int | None = None
    joined_numel: int = 0

    @property
    def offloads_activations(self) -> bool:
        return self.activations == "offload"


@dataclass(frozen=True)
class TrainingFacts:
    """The facts about a training that its plan depends on: names, sizes and fields, no tensors.

    params: of the optimizer. needs_grad_buffers: gradients must have host memory of their own; they
    get it anyway where no chunk loses its place by that. ranks: what is shared, with memory of its
    own; `params` have `own` then.

    Of a prepared model: units; gradients: bytes of each in host memory; staging_bytes: for
    gradients on their way from a device; params_of_ranks: `params` as each rank has them, if there
    are several; buffer_bytes: of the model's buffers; others_bytes: on the device already.
    """

    params: tuple[ParamSpec, ...] = ()
    needs_grad_buffers: bool = False
    ranks: RankShare | None = None
    speeds: Speeds = UNKNOWN
    is_prepared: bool = False
    units: UnitSizes = NO_UNITS
    gradients: tuple[int, ...] = ()
    staging_bytes: int = 0
    sharding: Sharding | None = None
    params_of_ranks: tuple[tuple[ParamSpec, ...], ...] = ()
    buffer_bytes: int = 0
    others_bytes: int = 0

    @cached_property
    def whole(self) -> tuple[Chunk, ...]:
        """The chunks where all state is in host memory."""
        return tuple(lay_out(self.params, CHUNK_NUMEL))

    @cached_property
    def state_bytes(self) -> int:
        """The host memory for all state of a prepared model's optimizer."""
        return layout_size(self.params, CHUNK_NUMEL)[0]

    @cached_property
    def least_state_bytes(self) -> int:
        """The least host memory that the state of a prepared model's optimizer can pass through, on
        the rank that needs most.
        """
        return max(map(least_arena_bytes, self.params_of_ranks or (self.params,)))

    @cached_property
    def least_spill_bytes(self) -> int:
        """The host memory with which spilled gradients can pass through: one chunk's."""
        chunks = lay_out([_beginning(param) for param in self.params], LEAST_CHUNK_NUMEL)
        widths = [param.element_bytes for param in self.params]
        each = (
            sum(round_up((p.end - p.begin) * widths[p.param], _LINE) for p in chunk.slices)
            for chunk in chunks
        )
        return max(each, default=0)


def least_arena_bytes(params: Sequence[ParamSpec]) -> int:
    """Return the host memory with which `plan_state` works if there is a disk, for parameters on
    the CPU.
    """
    whole, largest = layout_size(params, LEAST_CHUNK_NUMEL)
    return min(LEAST_BUFFERS * largest, whole)


def _beginning(param: ParamSpec) -> ParamSpec:
    """Cut the parameter down to a few chunks, if it has more."""
    begin, end = param.own or (0, param.numel)
    end = min(end, begin + 4 * LEAST_CHUNK_NUMEL)
    return replace(param, numel=min(param.numel, end), own=param.own and (begin, end))


def most_numel(staging_bytes: int) -> int:
    """Return the elements that a chunk may have, so that the gradients of several chunks at once
    have room in so much memory.
    """
    fitting = staging_bytes // (_CHUNKS_STAGED * ELEMENT_BYTES)
    return max(LEAST_CHUNK_NUMEL, 1 << max(0, fitting.bit_length() - 1))


def plan_state(facts: TrainingFacts, budgets: Budgets) -> Plan:
    """Keep in host memory what fits, move the rest through a few buffers.

    A chunk has 4 Mi elements, 1 Mi where some go to disk, less where the budget would not hold the
    buffers. Raises `CapacityError` where nothing works.
    """
    limit, has_disk = budgets.host_bytes, budgets.directories > 0
    numel = _at_most(CHUNK_NUMEL, budgets)
    while True:
        for has_grad_buffers in (True,) if facts.needs_grad_buffers else (True, False):
            whole = _keep_all(facts, numel, budgets.joined_numel, has_grad_buffers, limit)
            if limit is None or whole.arena_bytes <= limit:
                return whole
        # Without a disk, only smaller staging buffers save memory.
        if has_disk or not whole.staging_buffers or numel <= LEAST_CHUNK_NUMEL:
            break
        numel //= 2
    assert limit is not None, "without a limit everything fits"
    if not has_disk:
        raise CapacityError(
            f"host_memory: the optimizer state needs {format_size(whole.state_bytes)} "
            f"({whole.state_bytes} bytes)"
            + _and_device_copies(whole)
            + _and_network(whole)
            + f", {format_size(limit)} are allowed"
            + _others(limit, budgets.held_bytes)
            + "; raise host_memory, or give nvme=... a directory on a fast drive for the rest"
        )
    numel = _at_most(budgets.chunk_numel or min(numel, DISK_CHUNK_NUMEL), budgets)
    while True:
        joined = max(1, budgets.joined_numel // numel)
        away = replace(
            whole,
            chunks=_laid_out(facts, numel, joined),
            chunk_numel=numel,
            joined=joined,
            resident=frozenset(),
        )
        fits = BUFFERS * away.buffer_bytes + away.arena_bytes <= limit
        if fits or numel <= LEAST_CHUNK_NUMEL:
            return _keep_some(away, limit, whole.arena_bytes, budgets.held_bytes)
        numel //= 2


def _at_most(numel: int, budgets: Budgets) -> int:
    return min(numel, budgets.most_chunk_numel or numel)


def _laid_out(facts: TrainingFacts, numel: int, joined: int) -> tuple[Chunk, ...]:
    if (numel, joined) == (CHUNK_NUMEL, 1):
        return facts.whole
    return tuple(lay_out(facts.params, numel * joined))


def _keep_all(
    facts: TrainingFacts, numel: int, joined_numel: int, has_grad_buffers: bool, limit: int | None
) -> Plan:
    """Plan all state in host memory, regardless of the budget."""
    joined = max(1, joined_numel // numel)
    chunks = _laid_out(facts, numel, joined)
    has_staging = largest_staging_buffer(chunks, facts.params, has_grad_buffers) > 0
    return Plan(
        params=facts.params,
        chunks=chunks,
        chunk_numel=numel,
        joined=joined,
        resident=frozenset(chunk.number for chunk in chunks),
        buffers=0,
        staging_buffers=STAGING_BUFFERS if has_staging else 0,
        # Ranks need only their own part of gradients, after the reduce-scatter.
        has_grad_buffers=has_grad_buffers
        and facts.ranks is None
        and any(param.device_bytes for param in facts.params)
        and not any(param.comes_late for param in facts.params),
        host_memory_bytes=limit,
        speeds=facts.speeds,
        ranks=facts.ranks,
    )


def _keep_some(away: Plan, budget: int, whole_bytes: int, held_bytes: int) -> Plan:
    """Give memory to gradient buffers, staging buffers and buffers first, then to as many resident
    chunks as fit. away: the plan with none of them resident, and no buffers. whole_bytes: what all
    would take.
    """
    largest, fixed, grads = away.buffer_bytes, away.arena_bytes, away.grad_buffers_bytes
    buffers = min(BUFFERS, (budget - fixed) // largest) if largest else 0
    if buffers < LEAST_BUFFERS and (largest or fixed > budget):
        raise CapacityError(
            f"host_memory: {format_size(budget)} ({budget} bytes)"
            f"{_others(budget, held_bytes)} are less than the "
            f"{LEAST_BUFFERS} buffers of {format_size(largest)} ({largest} bytes)"
            + (
                f" and {away.staging_buffers} staging buffers of "
                f"{format_size(away.staging_buffer_bytes)}"
                if away.staging_buffers
                else ""
            )
            + (f" and gradients of {format_size(grads)}" if grads else "")
            + _and_network(away)
            + " that the update needs; the least that works is "
            f"{min(LEAST_BUFFERS * largest + fixed, whole_bytes)} bytes"
        )
    resident = first_that_fit(away.chunks, budget - buffers * largest - fixed)
    return replace(away, resident=resident, buffers=buffers)


def first_that_fit(chunks: Sequence[Chunk], nbytes: int) -> frozenset[int]:
    """Return the numbers of the first chunks that have room in so many bytes."""
    resident = set()
    for chunk in chunks:
        if chunk.nbytes <= nbytes:
            resident.add(chunk.number)
            nbytes -= chunk.nbytes
    return frozenset(resident)


# --- what a refusal says --------------------------------------------------------------------------


def _and_device_copies(plan: Plan) -> str:
    if not plan.staging_buffers:
        return ""
    staging_bytes = plan.staging_buffers * plan.staging_buffer_bytes
    text = f" and copies of device parameters {format_size(staging_bytes)}"
    if plan.has_grad_buffers:
        text += f" and their gradients {format_size(plan.grad_buffers_bytes)}"
    return text


def _and_network(plan: Plan) -> str:
    if not plan.shared_bytes or plan.ranks is None:
        return ""
    text = f" and {plan.ranks.buffers} buffers for the network {format_size(plan.shared_bytes)}"
    return text + (" with gradients" if plan.ranks.grad_bytes else "")


def _others(budget: int, held_bytes: int) -> str:
    """Tell where the budget comes from, when other optimizers hold a part of it."""
    if not held_bytes:
        return ""
    size = format_size
    return (
        f" ({size(budget + held_bytes)} for the whole process, of which other optimizers hold "
        f"{size(held_bytes)}; close() what is not needed any more)"
    )
