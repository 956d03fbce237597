"""The step of a large model, from simulations of the same model with fewer of its repeated layers.

Each such model trains within the same plan, cut down with it: where a share of host memory holds a
third of all parameters, it holds a third of the fewer. What a step takes and moves is then linear
in the number of layers, since the layers in the middle are in the same position in both. Several
chunks of state that follow one another are simulated as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from offload.planning.layout import lay_out
from offload.planning.planner import TrainingFacts, first_that_fit
from offload.planning.shares import Shares, spill
from offload.planning.state_plan import Plan
from offload.planning.training import TrainingPlan
from offload.planning.unit import PAGE, UnitSizes, on_device_bytes
from offload.tools.forecast.workload import Workload

_UNITS_AHEAD = 2  # that a pass holds beside the one in use
_LEAST_BUFFERS = 5  # of joined chunks, so that reads, update and writes overlap


@dataclass(frozen=True)
class Fineness:
    """How finely a large model is simulated. few, more: periods of each run of layers. pieces: into
    which the state is cut.
    """

    few: int
    more: int
    pieces: int

    @classmethod
    def of(cls, numel: int) -> Fineness:
        """Choose it for so many parameters that are trained: what is put together from a few of
        very many layers needs more of them; so do passes that have hardly any state beside them.
        """
        return cls(8, 16, 1000) if _SMALL_NUMEL <= numel < _HUGE_NUMEL else cls(16, 32, 2000)


_SMALL_NUMEL, _HUGE_NUMEL = 2 * 10**9, 10**11
Run = TypeVar("Run")


@dataclass(frozen=True)
class Sample:
    """A model with some of the layers. weight: of what it takes and moves, in the sum over all
    samples that stands for the whole model. joined_numel: elements of neighbouring chunks that are
    simulated as one.
    """

    work: Workload
    weight: float
    joined_numel: int


def sample_sizes(
    periods: Mapping[Run, int], fineness: Fineness
) -> list[tuple[dict[Run, int], float]]:
    """Choose models with fewer periods of each run of repeated layers, each with its weight: one
    with few of all, and for each run one that has more of it. Runs that are not much longer stay as
    they are.
    """
    least, most = fineness.few, fineness.more
    long = {run: count for run, count in periods.items() if count > least + most}
    few = {run: least if run in long else count for run, count in periods.items()}
    slopes = {run: (count - least) / (most - least) for run, count in long.items()}
    found = [(few, 1.0 - sum(slopes.values()))]
    return found + [(few | {run: most}, slope) for run, slope in slopes.items()]


def weighted(samples: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted sums of all figures. One that is nearly nothing may be below zero, which
    keeps sums of them right.
    """
    names = dict.fromkeys(name for _, figures in samples for name in figures)
    return {name: sum(w * figures.get(name, 0.0) for w, figures in samples) for name in names}


def plan_of_sample(
    plan: TrainingPlan, few: TrainingFacts, joined: int, logits_bytes: int
) -> TrainingPlan:
    """Cut the plan of a model down to one with fewer layers, whose facts are `few`. joined: chunks
    that are simulated as one. logits_bytes: of both models.
    """
    shares = _shares_of(plan, few, joined)
    budgets = replace(plan.budgets, device_bytes=_device_bytes(plan, few, logits_bytes))
    return TrainingPlan(few, budgets, shares, _state_of(plan.state, few, joined))


def _shares_of(plan: TrainingPlan, few: TrainingFacts, joined: int) -> Shares:
    many, shares = plan.facts, plan.shares
    if not many.is_prepared:
        return shares
    on_disk = _part(shares.gradients_on_disk, sum(few.gradients), sum(many.gradients))
    spilled = spill(few.gradients, sum(few.gradients) - on_disk) if on_disk else []
    params = shares.params
    if not shares.holds_all_params:
        params = _room(params, many.units.pages, few.units.pages, _least(many.units))
    return replace(
        shares,
        params=sum(few.units.pages) if shares.holds_all_params else params,
        activations=_part(shares.activations, few.others_bytes, many.others_bytes),
        spilled=tuple(spilled),
        gradients_on_disk=sum(few.gradients[number] for number in spilled),
        staging=shares.staging * joined,
    )


def _state_of(state: Plan, few: TrainingFacts, joined: int) -> Plan:
    chunks = lay_out(few.params, state.chunk_numel * joined)
    held = frozenset(chunk.number for chunk in chunks)
    if state.buffers:
        whole = sum(chunk.nbytes for chunk in chunks)
        room = whole * state.resident_bytes // max(1, state.state_bytes)
        held = first_that_fit(chunks, room)
    return replace(
        state,
        params=few.params,
        chunks=tuple(chunks),
        resident=held,
        joined=1,
        buffers=min(state.buffers, max(_LEAST_BUFFERS, -(-state.buffers // joined))),
    )


def _device_bytes(plan: TrainingPlan, few: TrainingFacts, logits_bytes: int) -> int | None:
    """Return the limit of the device's memory: what others hold is less, and so is the part of the
    blocks that has room beside it. Room for logits is left twice, as the engine leaves it.
    """
    limit, many = plan.budgets.device_bytes, plan.facts
    if limit is None or not many.is_prepared:
        return limit
    sizes, fewer = ([on_device_bytes(n) for n in facts.units.nbytes] for facts in (many, few))
    left = limit - many.others_bytes
    twice = min(logits_bytes, max(0, left - _least(many.units)))
    return few.others_bytes + twice + _room(left - twice, sizes, fewer, _least(many.units))


def _least(units: UnitSizes) -> int:
    """Return the bytes that a pass needs for units, however many there are."""
    pages = sorted(units.pages)
    usual = pages[len(pages) // 2] if pages else 0
    return units.least_bytes + _UNITS_AHEAD * usual


def _room(room: int, many: Sequence[int], few: Sequence[int], least: int) -> int:
    """Return the room for fewer blocks that holds the same part of them, beside the least that a
    pass needs.
    """
    whole, fewer = sum(many), sum(few)
    if room >= whole:
        return room - whole + fewer
    least = min(least, room)
    cut = room - (whole - fewer) * (room - least) / max(1, whole - least)
    return int(cut) // PAGE * PAGE


def _part(nbytes: int, few: int, many: int) -> int:
    return nbytes * few // many if many else nbytes
