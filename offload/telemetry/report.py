"""The report of a run, for people and for machines, and how a wrapped optimizer or a prepared model
becomes one.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.core.config import format_size
from offload.core.errors import ConfigError
from offload.core.metrics import MOST_EVENTS, Sample
from offload.core.timeline import Event, StepFact, whole_steps
from offload.optim import Session, inner_optimizer, is_wrapped
from offload.optim.step_stats import StepStats
from offload.params.prepared import Prepared, prepared_of
from offload.params.trace import Trace
from offload.planning.planner import Budgets, TrainingFacts, plan_state
from offload.planning.profile import this_machine
from offload.planning.state_plan import Plan, Speeds
from offload.planning.tuning import ChosenTuning
from offload.planning.unit import enclosing
from offload.telemetry.iterations import TOKENS, IterationSummary, recent
from offload.telemetry.parts import Account, ModelUse, ProcessUse, RankUse
from offload.telemetry.report_text import show_report
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.run_file import About, ParamFact, Run, UnitFact
from offload.telemetry.words import (
    MOVES,
    STAGING,
    Writer,
    as_numbers,
    below,
    flat_key,
    log_numbers,
    show_rate,
    show_seconds,
)

MOST_USES = 1 << 14  # of units, in the file of a run: the last ones


@dataclass(frozen=True)
class Report:
    """A snapshot of a run. `str()` is for people, `to_dict()` for machines, `save_trace()` for a
    timeline.

    Bytes of `total` are all since the optimizer was wrapped, its seconds those of all steps;
    `outside` has the seconds of waits outside of steps, of a `state_dict()` for example. speeds:
    the best of this run, or of the probe before it (`measure=True`); the ceiling is computed from
    that of the disk.
    """

    plan: Plan
    total: Account
    last: Account  # the last step
    outside: dict[str, float]
    speeds: Speeds
    fallbacks: dict[str, str]
    disk_engine: str | None
    host_peak_bytes: int
    events: Sequence[Event] = field(repr=False)
    model: ModelUse | None = None  # None: the model is not prepared
    ranks: RankUse | None = None  # None: the state is not sharded over ranks
    process: ProcessUse | None = None  # None: not known, or it had more memory before
    # The order in which the model's units run, as far as it is known: no snapshot, it goes on.
    trace: Trace | None = field(default=None, repr=False, compare=False)
    # For the file of a run. No model and no optimizer: a report keeps no memory of theirs alive.
    samples: Sequence[Sample] = field(default_factory=list, repr=False)
    steps_done: Sequence[StepFact] = field(default_factory=list, repr=False)
    about: About | None = field(default=None, repr=False, compare=False)

    @property
    def counts(self) -> Mapping[str, int]:
        return self.total.counts

    @property
    def steps(self) -> int:
        return self.counts.get("steps", 0)

    @property
    def tuned(self) -> str | None:
        """What a profile sets, and which profile."""
        return None if self.about is None else self.about.tuned

    @property
    def host_bytes(self) -> int:
        """The host memory that was taken for the model and its optimizer."""
        return self.plan.arena_bytes if self.model is None else self.model.host_bytes

    @property
    def disk_bytes(self) -> int:
        """The bytes on disk now."""
        return self.plan.disk_bytes if self.model is None else self.model.disk_bytes

    @property
    def disk_read_bytes(self) -> int:
        return self.total.moved["disk_read_bytes"]

    @property
    def disk_written_bytes(self) -> int:
        """The wear of the drives, in bytes."""
        return self.total.moved["disk_written_bytes"]

    def to_dict(self) -> dict[str, Any]:
        """Return flat numbers and texts, for a logger or for JSON. Unknown ones are left out."""
        plan, told = self.plan, {"steps", *MOVES}
        known = {"predicted_step_seconds": plan.predicted_step_s, "disk_engine": self.disk_engine}
        return {
            "steps": self.steps,
            **below("total", self.total),
            **below("last_step", self.last),
            **{f"outside/seconds/{flat_key(cause)}": s for cause, s in self.outside.items()},
            **{f"count/{name}": n for name, n in self.counts.items() if name not in told},
            **below("speed", as_numbers(self.speeds, "disk_bytes_per_s", "update_bytes_per_s")),
            **{name: value for name, value in known.items() if value is not None},
            **below("model", self.model),
            **below("ranks", self.ranks),
            **below("process", self.process),
            "state_bytes": plan.state_bytes,
            "state_bytes_in_host_memory": plan.resident_bytes,
            "state_bytes_on_disk": plan.disk_bytes,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "fallbacks": len(self.fallbacks),
            **{f"fallback/{flat_key(what)}": why for what, why in self.fallbacks.items()},
        }

    @property
    def iterations(self) -> IterationSummary:
        """The summary of the iterations, which the page of the run shows as well."""
        return IterationSummary.of(self.steps_done, self.to_dict())

    @property
    def run_facts(self) -> RunFacts:
        """The facts and numbers from which the key figures are made, as from the run's file."""
        assert self.about is not None, "reports of runs have it"
        numbers = {f"{kind}/peak_bytes": n for kind, n in self._sampled_peaks().items()}
        numbers |= self.to_dict()  # the kernel's own peak is better than that of samples
        found = IterationSummary.of(self.steps_done, numbers)
        return RunFacts(self.about, numbers, self.fallbacks, found)

    def _sampled_peaks(self) -> dict[str, int]:
        peaks: Counter[str] = Counter()
        for sample in self.samples:
            peaks |= Counter({kind: sample.nbytes.get(kind, 0) for kind in ("device", "process")})
        return dict(peaks)

    def live_numbers(self, steps_before: int = 0) -> dict[str, float]:
        """Return the few numbers that are worth watching while training runs. Unknown ones are left
        out.

        Seconds, shares, rates and bytes moved are those of `iterations`, of the iterations after
        step `steps_before` alone, at least of the last one. device_bytes: of this process, when
        memory was last sampled. fallbacks: how many.
        """
        found = recent(self.steps_done, steps_before)
        newest = self.samples[-1].nbytes if self.samples else {}
        numbers = {
            "device_bytes": newest.get("device"),
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "iteration_seconds": found.typical_s if found.is_whole else None,
            "tokens_per_s": found.tokens_per_s,
            "stall_share": found.stall_share if found.is_whole else None,
            "step_seconds": found.step_s,
            "disk_read_bytes": found.moved.get("disk_read_bytes", 0),
            "disk_written_bytes": found.moved.get("disk_written_bytes", 0),
            "hit_rate": found.hit_rate,
            "prefetch_depth": None if self.model is None else self.model.depth,
            "fallbacks": len(self.fallbacks),
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def log_to(self, writer: Writer, step: int) -> None:
        """Write all numbers to TensorBoard's SummaryWriter, to a run of W&B, or to any object with
        the `add_scalar` of the one or the `log` of the other.
        """
        log_numbers(writer, below("offload", self.to_dict()), step)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file: for `offload report` (a page), for `offload plan --trace`, and
        as a timeline of the last steps for chrome://tracing or ui.perfetto.dev, with a row for each
        resource. How many steps depends on their chunks: the last 8192 events are kept. Only its
        owner can read the file; an existing one is replaced.
        """
        self.run().save(path)

    def run(self) -> Run:
        """Return the run as a file has it: the events of the last whole steps, the memory samples
        since their begin, and all steps, each of the three from 0 seconds on.
        """
        drawn = whole_steps(self.events, some_are_lost=len(self.events) >= MOST_EVENTS)
        start_s = min((event.begin_s for event in drawn), default=0.0)
        events = (e._replace(begin_s=e.begin_s - start_s, end_s=e.end_s - start_s) for e in drawn)
        kinds = tuple(dict.fromkeys(kind for sample in self.samples for kind in sample.nbytes))
        samples = (
            (sample.at_s - start_s, tuple(sample.nbytes.get(kind, 0) for kind in kinds))
            for sample in self.samples
            if sample.at_s >= start_s
        )
        return Run(self._whole_about(), tuple(events), kinds, tuple(samples))

    def _whole_about(self) -> About:
        assert self.about is not None, "reports of runs have it"
        cpu, cores = this_machine()
        plan, first_s = self.plan, self.steps_done[0].begin_s if self.steps_done else 0.0
        moving = (chunk.numel for chunk in plan.chunks if chunk.number not in plan.resident)
        return replace(
            self.about,
            made_by=f"offload {_version()}, torch {torch.__version__}",
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cpu=cpu,
            cores=cores,
            chunk_numel=max(moving, default=None),
            params=tuple(ParamFact.of(spec) for spec in plan.params if spec.fields),
            order=() if self.trace is None else tuple(self.trace.uses()[-MOST_USES:]),
            steps=tuple(
                replace(step, begin_s=step.begin_s - first_s, end_s=step.end_s - first_s)
                for step in self.steps_done
            ),
            fallbacks=self.fallbacks,
            numbers={
                name: float(n)
                for name, n in self.run_facts.numbers.items()
                if not isinstance(n, str)
            },
        )

    def __str__(self) -> str:
        return show_report(self.run_facts, self.total, self.outside, self._notes())

    def _notes(self) -> list[tuple[str, str]]:
        plan, size = self.plan, format_size
        known = {"disk": self.speeds.disk_bytes_per_s, "update": self.speeds.update_bytes_per_s}
        speeds = [f"{name} at {show_rate(s)}" for name, s in known.items() if s]
        notes = []
        if speeds:
            notes.append(("best speeds", f"{', '.join(speeds)}, both at once"))
        if plan.predicted_step_s is not None:
            notes.append(("predicted step()", f"{show_seconds(plan.predicted_step_s)} at best"))
        notes += self.model.notes() if self.model is not None else []
        notes += self.ranks.notes() if self.ranks is not None else []
        state = f"{size(plan.resident_bytes)} in host memory, {size(plan.disk_bytes)} on disk"
        notes.append(("state", state))
        notes.append(("disk, in use", size(self.disk_bytes)))
        if self.tuned is not None:
            notes.append(("tuned", self.tuned))
        if self.disk_engine:
            notes.append(("disk engine", self.disk_engine))
        if not self.fallbacks:
            notes.append(("fall-backs", "none"))
        return notes + [(f"fall-back: {what}", why) for what, why in self.fallbacks.items()]


def _version() -> str:
    try:
        return importlib.metadata.version("offload")
    except importlib.metadata.PackageNotFoundError:  # it runs from a source tree
        return "unknown"


# --- how it is made -------------------------------------------------------------------------------


def report_on(optimizer: Any) -> Report:
    """Make the report of a wrapped optimizer, or of a prepared model and its optimizer if it has
    one.
    """
    made, session = _found(optimizer)
    coordinator = session.coordinator if session is not None else None
    if session is not None:
        stats = session.step_stats
    else:  # for evaluation
        assert made is not None
        stats = StepStats(made.metrics)
    metrics, total = stats.metrics, stats.metrics.snapshot()
    steps_done = stats.steps.so_far()
    store = coordinator.store if coordinator else made.store if made is not None else None
    pools = coordinator.pools if coordinator else []
    if made is not None and made.pool is not None:
        pools.append(made.pool)
    ranks = coordinator.ranks if coordinator else None
    plan = session.plan if session is not None else plan_state(TrainingFacts(), Budgets())
    return Report(
        plan=plan,
        total=Account.of(total),
        last=Account.of(stats.last),
        outside=dict(total.outside),
        speeds=stats.speeds,
        fallbacks=dict(total.fallbacks),
        disk_engine=store.stats().engine if store else None,
        host_peak_bytes=sum(pool.stats().peak_bytes for pool in pools),
        events=metrics.events(),
        model=ModelUse.of(made, total) if made is not None else None,
        ranks=RankUse(plan.ranks, dict(ranks.sent_bytes)) if ranks and plan.ranks else None,
        process=ProcessUse.now(),
        trace=made.trace if made is not None else None,
        samples=metrics.samples(),
        steps_done=steps_done,
        about=_about_model(made) if made is not None else _about_optimizer(session),
    )


def count_tokens_of(optimizer: Any, tokens: int) -> None:
    """Count tokens that the loop of a wrapped optimizer or a prepared model takes for its next
    step.
    """
    made, session = _found(optimizer)
    owner = session if session is not None else made
    assert owner is not None
    owner.metrics.count(TOKENS, tokens)


def _found(optimizer: Any) -> tuple[Prepared | None, Session | None]:
    """Return the prepared model and the session of a wrapped optimizer, or of a prepared model and
    its optimizer if it has one.
    """
    made = prepared_of(optimizer)
    session = made.session if made is not None else _session_of(optimizer)
    coordinator = session.coordinator if session is not None else None
    if coordinator is not None:
        made = coordinator.owner if isinstance(coordinator.owner, Prepared) else None
    return made, session


def _session_of(optimizer: Any) -> Session:
    """Return the session of the optimizer itself, or of the one that it holds, as accelerate's and
    Lightning's do.
    """
    found = inner_optimizer(optimizer)
    if not is_wrapped(found):
        raise ConfigError(
            f"report: expected a wrapped optimizer or a prepared model, got "
            f"{type(optimizer).__name__}"
        )
    return found._offload_session


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
        shares={
            **made.shares.parts,
            "gradients": made.shares.gradients - made.shares.staging,
            STAGING: made.shares.staging,
            "gradients on disk": made.shares.gradients_on_disk,
        },
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
