"""How a wrapped optimizer or a prepared model becomes a report, with the facts for the file of a
run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from offload.core.budget import HOST
from offload.core.errors import ConfigError
from offload.core.heap import HEAP
from offload.core.metrics import Metrics
from offload.core.timeline import StepFact
from offload.optim import Session, is_wrapped
from offload.optim.step_stats import StepStats
from offload.params.prepared import Prepared, prepared_of
from offload.planning.planner import Budgets, TrainingFacts, plan_state
from offload.planning.tuning import ChosenTuning
from offload.planning.unit import enclosing
from offload.telemetry.iterations import Iteration, iterations_of
from offload.telemetry.model_use import ModelUse
from offload.telemetry.report import Account, ProcessUse, RankUse, Report
from offload.telemetry.run_file import About, UnitFact


def report_on(optimizer: Any) -> Report:
    """Make the report of a wrapped optimizer, or of a prepared model and its optimizer if it has
    one.
    """
    made = prepared_of(optimizer)
    if made is not None and made.session is None:  # for evaluation
        return _report(made, None, made.metrics, StepStats(made.metrics))
    session: Session = made.session if made and made.session else _session_of(optimizer)
    made = session.coordinator.owner if isinstance(session.coordinator.owner, Prepared) else None
    return _report(made, session, session.metrics, session.step_stats)


def _report(
    made: Prepared | None, session: Session | None, metrics: Metrics, step_stats: StepStats
) -> Report:
    """Make the report. At least one of `made` and `session` is not None."""
    total, speeds, steps_done = metrics.snapshot(), step_stats.speeds, step_stats.steps.so_far()
    coordinator = session.coordinator if session is not None else None
    store = coordinator.store if coordinator else made.store if made is not None else None
    pools = coordinator.pools if coordinator else []
    if made is not None and made.pool is not None:
        pools.append(made.pool)
    ranks = coordinator.ranks if coordinator else None
    plan = session.plan if session is not None else plan_state(TrainingFacts(), Budgets())
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
        model=ModelUse.of(made, total, _last(steps_done)) if made is not None else None,
        ranks=RankUse(plan.ranks, dict(ranks.sent_bytes)) if ranks and plan.ranks else None,
        process=_process_use(),
        trace=made.trace if made is not None else None,
        samples=metrics.samples(),
        steps_done=steps_done,
        about=_about_model(made) if made is not None else _about_optimizer(session),
    )


def _last(steps: Sequence[StepFact]) -> Iteration | None:
    """Return the last iteration; None: no step was done."""
    return deque(iterations_of(steps[-2:]), maxlen=1).pop() if steps else None


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


# --- what a run is --------------------------------------------------------------------------------


def _about_model(made: Prepared) -> About:
    assert made.engine is not None
    prepare_plan, config = made.prepare_plan, made.prepare_plan.config
    kept, stored = enclosing(made.units), {unit.number for unit in prepare_plan.stored}
    return About(
        title=type(made.engine.model).__name__,
        kind="prepare",
        device=str(prepare_plan.device),
        prefetch_depth=str(config.prefetch_depth),
        activations=config.activations,
        tuned=_tuned(prepare_plan.chosen),
        host_bytes=prepare_plan.host_bytes,
        device_bytes=prepare_plan.plan.device_bytes or None,
        directories=len(prepare_plan.directories),
        plan=str(prepare_plan.plan),
        shares={**made.shares.parts, "gradients on disk": made.shares.gradients_on_disk},
        units=tuple(
            UnitFact(u.name, u.nbytes, u.needs, u.number in kept, u.number not in stored)
            for u in made.units
        ),
    )


def _about_optimizer(session: Session | None) -> About:
    assert session is not None
    config, plan = session.config, session.plan
    return About(
        title=type(session.optimizer).__mro__[2].__name__,  # after the engine's own two classes
        kind="wrap",
        device="device" if plan.staging_buffers else "cpu",
        prefetch_depth="",
        activations="keep",
        tuned=_tuned(session.chosen),
        host_bytes=plan.host_memory_bytes,
        device_bytes=None,
        directories=len(config.nvme or ()),  # type: ignore[arg-type]
        plan=str(plan),
        shares={"state": plan.arena_bytes},
        units=(),
    )


def _tuned(chosen: ChosenTuning) -> str | None:
    return str(chosen) if chosen.source is not None else None
