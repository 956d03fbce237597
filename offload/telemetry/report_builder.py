"""How a wrapped optimizer or a prepared model becomes a report, with the facts for the file of a
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.core.budget import HOST
from offload.core.errors import ConfigError
from offload.core.heap import HEAP
from offload.core.metrics import Metrics, MetricsSnapshot
from offload.distributed import NETWORK
from offload.optim import Session, is_wrapped
from offload.optim.step_stats import StepStats
from offload.params.prepared import Prepared, prepared_of
from offload.params.sharded_residency import ShardedResidency
from offload.planning.planner import make_plan
from offload.planning.tuning import ChosenTuning
from offload.planning.unit import enclosing
from offload.telemetry.recording import RunFacts
from offload.telemetry.report import (
    Account,
    ActivationUse,
    ModelUse,
    ProcessUse,
    RankUse,
    Report,
    SharedUse,
)
from offload.telemetry.run_file import UnitFact

_WAITS = ("parameter read", "parameter write", "device copy", NETWORK)
_ACTIVATION_WAITS = ("activation read", "activation write")


def report_on(optimizer: Any) -> Report:
    """Make the report of a wrapped optimizer, or of a prepared model and its optimizer if it has
    one.
    """
    made = prepared_of(optimizer)
    if made is not None and made.session is None:  # for evaluation
        return _report(made, None, made.metrics, StepStats(made.metrics))
    session: Session = made.session if made and made.session else _session_of(optimizer)
    made = session.host if isinstance(session.host, Prepared) else None
    return _report(made, session, session.metrics, session.step_stats)


def _report(
    made: Prepared | None, session: Session | None, metrics: Metrics, step_stats: StepStats
) -> Report:
    """Make the report. At least one of `made` and `session` is not None."""
    total, speeds = metrics.snapshot(), step_stats.speeds
    store = session.store if session is not None else made.store if made is not None else None
    pools = list(session.pools) if session is not None else []
    if made is not None and made.pool is not None:
        pools.append(made.pool)
    ranks = session.ranks if session is not None else None
    plan = session.plan if session is not None else make_plan([], None, has_disk=False)
    return Report(
        plan=plan,
        total=Account.of(total, speeds, step_stats.stepped),
        last=Account.of(step_stats.last, speeds),
        outside=dict(total.outside),
        speeds=speeds,
        fallbacks=dict(total.fallbacks),
        disk_engine=store.stats().engine if store else None,
        host_peak_bytes=sum(pool.stats().peak_bytes for pool in pools),
        events=metrics.events(),
        model=use_of(made, step_stats) if made is not None else None,
        ranks=RankUse(plan.ranks, dict(ranks.sent_bytes)) if ranks and plan.ranks else None,
        process=_process_use(),
        trace=made.trace if made is not None else None,
        samples=metrics.samples(),
        steps_done=step_stats.steps.so_far(),
        facts=_facts_of(made, session),
        tuned=_tuned(_chosen(made, session)),
    )


def _process_use() -> ProcessUse | None:
    base, peak = HEAP.base_bytes, HEAP.peak_bytes()
    return None if base is None or peak is None else ProcessUse(base, HOST.peak_bytes, peak)


def _session_of(optimizer: Any) -> Session:
    """Return the session of the optimizer itself, or of the one that it holds, as accelerate's and
    Lightning's do.
    """
    found = optimizer
    while not is_wrapped(found):
        outer, found = found, getattr(found, "optimizer", None)
        if found is outer or not isinstance(found, torch.optim.Optimizer):
            raise ConfigError(
                f"report: expected a wrapped optimizer or a prepared model, got "
                f"{type(optimizer).__name__}"
            )
    session: Session = found._offload_session
    return session


# --- what a model costs ---------------------------------------------------------------------------


def use_of(made: Prepared, step_stats: StepStats) -> ModelUse:
    """Collect the state and the costs of a prepared model, for a report."""
    assert made.engine is not None
    residency, total = made.engine.residency, made.metrics.snapshot()
    return ModelUse(
        units=len(made.units),
        param_bytes=sum(map(made.prepare_plan.host_bytes_of, made.units)),
        shares=made.shares,
        held_bytes=sum(b.nbytes for b in residency.blocks if b.memory is not None),
        disk_bytes=_disk_bytes(made),
        depth=residency.prefetch.depth,
        hits=total.counts.get("parameter_hits", 0),
        misses=total.counts.get("parameter_misses", 0),
        waited_s=_waited_s(total, _WAITS),
        round_s=step_stats.round_s,
        round_waited_s=_waited_s(step_stats.round, _WAITS),
        read_bytes_per_s=residency.prefetch.read_bytes_per_s,
        activations=_activations_use(made, total),
        shared=_shared_use(made, total),
    )


def _disk_bytes(made: Prepared) -> int:
    """Sum the bytes of drives in use now, for all that belongs to the model."""
    assert made.engine is not None
    kept = made.engine.activations
    return (
        sum(store.stats().used_bytes for store in made.stores)
        + made.shares.gradients_on_disk
        + (kept.disk_bytes if kept is not None else 0)
    )


def _activations_use(made: Prepared, total: MetricsSnapshot) -> ActivationUse | None:
    assert made.engine is not None
    kept = made.engine.activations
    if kept is None:
        return None
    return ActivationUse(
        sent_bytes=total.counts.get("activations_offloaded_bytes", 0),
        host_bytes=kept.host_bytes,
        disk_bytes=kept.disk_bytes,
        hits=total.counts.get("activation_hits", 0),
        misses=total.counts.get("activation_misses", 0),
        waited_s=_waited_s(total, _ACTIVATION_WAITS),
    )


def _shared_use(made: Prepared, total: MetricsSnapshot) -> SharedUse | None:
    assert made.engine is not None
    residency = made.engine.residency
    if made.ranks is None or not isinstance(residency, ShardedResidency):
        return None
    return SharedUse(
        *made.ranks.place,
        whole_bytes=residency.tier.budget_bytes,
        whole_peak_bytes=residency.tier.peak_bytes,
        gathered_bytes=total.counts.get("gathered_bytes", 0),
        reduced_bytes=total.counts.get("reduced_bytes", 0),
        sent_bytes=dict(made.ranks.sent_bytes),
        waited_s=_waited_s(total, [NETWORK]),
    )


def _waited_s(snapshot: MetricsSnapshot, causes: Sequence[str]) -> float:
    """Sum the seconds that forward and backward passes waited for these causes."""
    return sum(snapshot.outside.get(cause, 0.0) for cause in causes)


# --- what a run is --------------------------------------------------------------------------------


def _facts_of(made: Prepared | None, session: Session | None) -> RunFacts:
    if made is not None:
        return _facts_of_model(made)
    assert session is not None
    return _facts_of_optimizer(session)


def _facts_of_model(made: Prepared) -> RunFacts:
    assert made.engine is not None
    prepare_plan, config = made.prepare_plan, made.prepare_plan.config
    kept, stored = enclosing(made.units), {unit.number for unit in prepare_plan.stored}
    units = [
        UnitFact(u.name, u.nbytes, u.needs, u.number in kept, u.number not in stored)
        for u in made.units
    ]
    return RunFacts(
        title=type(made.engine.model).__name__,
        kind="prepare",
        device=str(prepare_plan.device),
        prefetch_depth=str(config.prefetch_depth),
        activations=config.activations,
        tuned=_tuned(prepare_plan.chosen),
        host_bytes=prepare_plan.host_bytes,
        device_bytes=prepare_plan.device_bytes or None,
        directories=len(prepare_plan.directories),
        plan=prepare_plan.plan,
        shares={**made.shares.parts, "gradients on disk": made.shares.gradients_on_disk},
        units=units,
    )


def _facts_of_optimizer(session: Session) -> RunFacts:
    config, plan = session.config, session.plan
    return RunFacts(
        title=type(session.optimizer).__mro__[2].__name__,  # after the engine's own two classes
        kind="wrap",
        device="device" if plan.staging_buffers else "cpu",
        prefetch_depth="",
        activations="keep",
        tuned=_tuned(session.chosen),
        host_bytes=plan.host_memory_bytes,
        device_bytes=None,
        directories=len(config.nvme or ()),  # type: ignore[arg-type]
        plan=plan,
        shares={"state": plan.arena_bytes},
    )


def _chosen(made: Prepared | None, session: Session | None) -> ChosenTuning:
    if made is not None:
        return made.prepare_plan.chosen
    assert session is not None
    return session.chosen


def _tuned(chosen: ChosenTuning) -> str | None:
    return str(chosen) if chosen.source is not None else None
