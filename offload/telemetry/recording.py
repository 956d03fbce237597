"""How a report's events, samples and steps become a run that can be written to a file."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.core.metrics import MOST_EVENTS, Sample
from offload.core.step_fact import StepFact
from offload.core.timeline import Event, whole_steps
from offload.planning.layout import MASTER, ParamSpec
from offload.planning.planner import Plan
from offload.planning.profile import this_machine
from offload.telemetry.run_file import About, ParamFact, Run, UnitFact, relative

MOST_USES = 1 << 14  # of units, the last ones


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that do not change while it goes on. units: empty if the model is not
    prepared.
    """

    title: str
    kind: str
    device: str
    prefetch_depth: str
    activations: str
    tuned: str | None
    host_bytes: int | None
    device_bytes: int | None
    directories: int
    plan: object  # numbers alone; made into a text when a file is written
    shares: Mapping[str, int]
    units: Sequence[UnitFact] = ()
    order: Sequence[tuple[int, int]] = field(default=())


def make_run(
    facts: RunFacts,
    plan: Plan,
    events: Sequence[Event],
    samples: Sequence[Sample],
    steps: Iterable[StepFact],
    numbers: Mapping[str, Any],
    fallbacks: Mapping[str, str],
) -> Run:
    """Make a run of the events of the last whole steps, the memory samples since their begin, and a
    line for each step.
    """
    drawn = whole_steps(events, some_are_lost=len(events) >= MOST_EVENTS)
    start_s = min((event.begin_s for event in drawn), default=0.0)
    names = tuple(dict.fromkeys(name for sample in samples for name in sample.nbytes))
    rows = [(s.at_s, tuple(s.nbytes.get(name, 0) for name in names)) for s in samples]
    kept_events, kept_samples = relative(drawn, rows, start_s)
    return Run(
        about=_about(facts, plan, _from_first(steps), numbers, fallbacks),
        events=kept_events,
        memory=names,
        samples=kept_samples,
    )


def _from_first(steps: Iterable[StepFact]) -> tuple[StepFact, ...]:
    """Shift the times of steps so that the first one begins at 0."""
    found = list(steps)
    start_s = found[0].begin_s if found else 0.0
    return tuple(
        StepFact(s.number, s.begin_s - start_s, s.end_s - start_s, s.seconds, s.counts)
        for s in found
    )


def _about(
    facts: RunFacts,
    plan: Plan,
    steps: tuple[StepFact, ...],
    numbers: Mapping[str, Any],
    fallbacks: Mapping[str, str],
) -> About:
    cpu, cores = this_machine()
    moving = [chunk.numel for chunk in plan.chunks if chunk.number not in plan.resident]
    return About(
        title=facts.title,
        made_by=f"offload {_version()}, torch {torch.__version__}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=cpu,
        cores=cores,
        device=facts.device,
        kind=facts.kind,
        prefetch_depth=facts.prefetch_depth,
        activations=facts.activations,
        tuned=facts.tuned,
        host_bytes=facts.host_bytes,
        device_bytes=facts.device_bytes,
        directories=facts.directories,
        plan=str(facts.plan),
        shares=dict(facts.shares),
        chunk_numel=max(moving, default=None),
        units=tuple(facts.units),
        params=tuple(param_fact(spec) for spec in plan.params if spec.fields),
        order=tuple(facts.order[-MOST_USES:]),
        steps=steps,
        fallbacks=dict(fallbacks),
        numbers={name: float(v) for name, v in numbers.items() if _is_plain(v)},
    )


def _version() -> str:
    try:
        return importlib.metadata.version("offload")
    except importlib.metadata.PackageNotFoundError:  # it runs from a source tree
        return "unknown"


def param_fact(spec: ParamSpec) -> ParamFact:
    each = 2 if MASTER in spec.fields else 4
    grad = spec.numel * each
    is_on_device = spec.device_bytes > 0
    return ParamFact(spec.name, spec.numel, each, spec.fields, spec.unit, grad, is_on_device)


def _is_plain(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0
