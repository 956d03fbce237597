"""The plan of a simulated training, from the facts of its workload: those that `prepare` and `wrap`
gather from a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from offload.params.gradients import STAGING_MOST_BYTES, STAGING_PLACES
from offload.params.spill import slot_bytes
from offload.planning.layout import ELEMENT_BYTES, ParamSpec, round_up
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.training import TrainingPlan, plan_training
from offload.planning.unit import PAGE, UnitSizes
from offload.telemetry.run_file import ParamFact, UnitFact
from offload.tools.forecast.workload import Workload

_ALIGN_BYTES = 64  # of a gradient's place


def plan_of(work: Workload, budgets: Budgets) -> TrainingPlan:
    """Plan the workload within the budgets. Raises `CapacityError` with the arithmetic if they
    cannot work, as `prepare` and `wrap` do.
    """
    return plan_training(facts_of(work, budgets.offloads_activations), budgets)


def facts_of(work: Workload, offloads_activations: bool) -> TrainingFacts:
    """Gather the facts that the plan depends on. What the engine measures on a device while it runs
    is known here.
    """
    others = work.logits_bytes + (0 if offloads_activations else work.activation_bytes)
    return _facts(work.params, work.units, work.device, others)


@lru_cache(maxsize=8)  # one model is planned within many budgets
def _facts(
    params: tuple[ParamFact, ...], units: tuple[UnitFact, ...], device: str, others_bytes: int
) -> TrainingFacts:
    specs = tuple(map(_spec, params))
    if not units:
        return TrainingFacts(specs)
    sizes = UnitSizes(
        tuple(unit.nbytes for unit in units),
        tuple(unit.needs for unit in units),
        frozenset(n for n, unit in enumerate(units) if unit.is_kept),
        frozenset(n for n, unit in enumerate(units) if unit.is_weight_block),
    )
    largest = max((param.grad_bytes for param in params), default=0)
    staging = STAGING_PLACES * round_up(min(largest, STAGING_MOST_BYTES), PAGE)
    return TrainingFacts(
        specs,
        is_prepared=True,
        units=sizes,
        gradients=tuple(
            round_up(params[n].grad_bytes, _ALIGN_BYTES) for n in _in_order_of_units(specs)
        ),
        staging_bytes=staging if device != "cpu" else 0,
        others_bytes=others_bytes,
    )


def _spec(fact: ParamFact) -> ParamSpec:
    there = fact.element_bytes if fact.is_on_device and fact.unit is None else 0
    return ParamSpec(fact.name, fact.numel, fact.fields, there, fact.unit)


def _in_order_of_units(specs: Sequence[ParamSpec]) -> list[int]:
    return sorted(range(len(specs)), key=lambda number: specs[number].unit or 0)


def spilled_params(plan: TrainingPlan) -> frozenset[int]:
    """Return the numbers of the parameters whose gradients are spilled."""
    order = _in_order_of_units(plan.facts.params)
    return frozenset(order[number] for number in plan.shares.spilled)


def staged_chunks(plan: TrainingPlan) -> int:
    """Return the number of chunks whose spilled gradients can be staged at once."""
    if not plan.shares.spilled:
        return 0
    slot = slot_bytes(plan.state.chunks, dict.fromkeys(spilled_params(plan), ELEMENT_BYTES))
    return max(1, plan.shares.staging // max(1, slot))
