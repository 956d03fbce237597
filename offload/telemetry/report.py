"""The report of a run, for people and for machines."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from offload.core.config import format_size
from offload.core.errors import ConfigError
from offload.core.metrics import MOST_EVENTS, MetricsSnapshot, Sample
from offload.core.timeline import IN_MODEL, IN_STEP, OTHER, Event, StepFact, whole_steps
from offload.params.trace import Trace
from offload.planning.profile import this_machine
from offload.planning.state_plan import Plan, RankShare, Speeds
from offload.telemetry.iterations import IterationSummary, stall_share
from offload.telemetry.model_use import ModelUse
from offload.telemetry.run_file import About, ParamFact, Run
from offload.telemetry.words import (
    MOVES,
    as_numbers,
    below,
    flat_key,
    key_numbers,
    show_cause,
    show_part,
    show_rate,
    show_share,
)

# Causes of a step's seconds. All are listed, also those that took none; other causes follow.
CAUSES = ("disk read", "disk write", "device copy", "network", "gradient norm", "update", OTHER)
MOST_USES = 1 << 14  # of units, in the file of a run: the last ones
BOOKS_MARGIN_BYTES = 300 << 20  # of RSS beyond the engine's account, before the report mentions it
_SHOWN_S = 0.0005  # what would be printed as 0.000 is left out


@dataclass(frozen=True)
class Account:
    """The bytes that some steps have moved, and the causes of their time; the seconds add up to the
    time in `step()`. ceiling_s: the least time that the measured speeds allow; None: not known.
    """

    counts: Mapping[str, int]
    seconds: dict[str, float]
    ceiling_s: float | None

    @classmethod
    def of(
        cls, snapshot: MetricsSnapshot, speeds: Speeds, stepped: Mapping[str, int] | None = None
    ) -> Account:
        """Make the account of a snapshot. stepped: the bytes that were moved within steps, if bytes
        were moved outside of steps, too.
        """
        counts = dict(snapshot.counts)
        seconds = {cause: snapshot.seconds.get(cause, 0.0) for cause in CAUSES}
        seconds.update(snapshot.seconds)
        moved = counts if stepped is None else stepped
        disk = moved.get("disk_read_bytes", 0) + moved.get("disk_written_bytes", 0)
        parts = speeds.least_s(disk, moved.get("updated_bytes", 0))
        return cls(counts, seconds, max(parts.values()) if parts else None)

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share_of_ceiling(self) -> float | None:
        """The least possible time over the time taken: 1 is as fast as the slower of disk and
        update could be alone.
        """
        return self.ceiling_s / self.step_s if self.ceiling_s and self.step_s else None

    @property
    def moved(self) -> dict[str, int]:
        """Bytes by tier and direction."""
        return {name: self.counts.get(name, 0) for name in MOVES}

    def to_dict(self) -> dict[str, float]:
        return {
            **self.moved,
            **as_numbers(self, "step_s", "ceiling_s", "share_of_ceiling"),
            **{f"seconds/{flat_key(cause)}": value for cause, value in self.seconds.items()},
        }


@dataclass(frozen=True)
class RankUse:
    """The traffic of an optimizer whose state is sharded over ranks. sent_bytes: of this rank, by
    kind, since it was wrapped: `gather` for new parameters (and whole states), `reduce` for
    gradients, `control` for messages between ranks.
    """

    share: RankShare
    sent_bytes: Mapping[str, int]

    def to_dict(self) -> dict[str, int]:
        plain = as_numbers(self.share, "stage", "rank", "count")
        return {**plain, **below("sent_bytes", self.sent_bytes)}

    def notes(self) -> list[tuple[str, str]]:
        each = ", ".join(f"{kind} {format_size(n)}" for kind, n in self.sent_bytes.items())
        return [("ranks", str(self.share)), ("sent over the network", each or "nothing")]


@dataclass(frozen=True)
class ProcessUse:
    """The resident memory of this process as the kernel counts it, beside the engine's own account.

    base_bytes: RSS before the engine took any memory.
    engine_bytes: the most that it has taken of `host_memory`.
    peak_bytes: the highest RSS since then.
    """

    base_bytes: int
    engine_bytes: int
    peak_bytes: int

    @property
    def beyond_bytes(self) -> int:
        """The bytes of the peak that the engine's account does not explain."""
        return max(0, self.peak_bytes - self.base_bytes - self.engine_bytes)

    def to_dict(self) -> dict[str, int]:
        return {"peak_bytes": self.peak_bytes, "beyond_books_bytes": self.beyond_bytes}

    def notes(self) -> list[tuple[str, str]]:
        """List notes for people; none if the peak is within `BOOKS_MARGIN_BYTES` of the engine's
        account.
        """
        if self.beyond_bytes <= BOOKS_MARGIN_BYTES:
            return []
        size = format_size
        text = (
            f"{size(self.peak_bytes)} at the peak, {size(self.beyond_bytes)} more than the "
            f"{size(self.base_bytes)} before and the {size(self.engine_bytes)} that the engine has "
            "taken: activations, gradients in autograd's hands, your own data"
        )
        return [("resident memory", text)]


@dataclass(frozen=True)
class Report:
    """A snapshot of a run. `str()` is for people, `to_dict()` for machines, `save_trace()` for a
    timeline.

    Bytes of `total` are all since the optimizer was wrapped, its seconds those of all steps;
    `outside` has the seconds of waits outside of steps, of a `state_dict()` for example. speeds:
    the best of this run, or of the probe before it (`measure=True`); the ceiling is computed from
    them.
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
            "host_peak_bytes": self.host_peak_bytes,
            "fallbacks": len(self.fallbacks),
            **{f"fallback/{flat_key(what)}": why for what, why in self.fallbacks.items()},
        }

    @property
    def iterations(self) -> IterationSummary:
        """The summary of the iterations, which the page of the run shows as well."""
        return IterationSummary.of(self.steps_done, self.to_dict())

    def live_numbers(self, steps_before: int = 0) -> dict[str, float]:
        """Return the few numbers that are worth watching while training runs. Unknown ones are left
        out.

        stall_share: of the iterations after step `steps_before`, at least of the last one.
        device_bytes: of this process, when memory was last sampled. step_seconds: of the last
        `step()`. disk_read_bytes, disk_written_bytes: of the last iteration. fallbacks: how many.
        """
        model, plan = self.model, self.plan
        counts = self.steps_done[-1].counts if self.steps_done else {}
        newest = self.samples[-1].nbytes if self.samples else {}
        numbers = {
            "device_bytes": newest.get("device"),
            "host_bytes": plan.arena_bytes if model is None else model.host_bytes,
            "disk_bytes": plan.disk_bytes if model is None else model.disk_bytes,
            "stall_share": stall_share(self.steps_done, steps_before),
            "step_seconds": self.last.step_s,
            "disk_read_bytes": counts.get("disk_read_bytes", 0),
            "disk_written_bytes": counts.get("disk_written_bytes", 0),
            "hit_rate": None if model is None else model.hit_rate,
            "prefetch_depth": None if model is None else model.depth,
            "fallbacks": len(self.fallbacks),
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def log_to(self, writer: Writer, step: int) -> None:
        """Write all numbers to TensorBoard's SummaryWriter, to a run of W&B, or to any object with
        the `add_scalar` of the one or the `log` of the other.
        """
        plain = {k: v for k, v in self.to_dict().items() if isinstance(v, int | float)}
        log_numbers(writer, below("offload", plain), step)

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
            numbers={name: float(n) for name, n in self.to_dict().items() if _is_plain(n)},
        )

    def __str__(self) -> str:
        rows = [*self._rows()]
        wide = [max(len(row[i]) for row in rows) for i in range(2)]
        table = [f"{name:<{wide[0]}}  {a:>{wide[1]}}  {b:>16}".rstrip() for name, a, b in rows]
        key = [(name, f"{text} ({note})") for name, text, note in key_numbers(self.iterations)]
        above, notes = (
            [f"{name:<{wide[0]}}  {text}" for name, text in each] for each in (key, self._notes())
        )
        return "\n".join([*above, *table, *notes])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the rows of the table: a name, in all, in the last step."""
        total, last = self.total, self.last
        yield "", "in all", "last step"
        yield "steps", str(self.steps), ""
        yield "time in step()", f"{total.step_s:.3f} s", f"{last.step_s:.3f} s"
        for cause, seconds in total.seconds.items():
            if seconds >= _SHOWN_S:
                of_last = _part(last.seconds.get(cause, 0.0), last.step_s)
                yield f"  {show_cause(IN_STEP + cause)}", _part(seconds, total.step_s), of_last
        for name, text in MOVES.items():
            if total.moved[name] or name == "disk_written_bytes":
                yield text, format_size(total.moved[name]), format_size(last.moved[name])
        shares = [one.share_of_ceiling for one in (total, last)]
        texts = ["not known" if share is None else show_share(share) for share in shares]
        yield "share of step()'s own ceiling", texts[0], texts[1]

    def _notes(self) -> list[tuple[str, str]]:
        plan, size = self.plan, format_size
        known = {"disk": self.speeds.disk_bytes_per_s, "update": self.speeds.update_bytes_per_s}
        speeds = [f"{name} at {show_rate(s)}" for name, s in known.items() if s]
        notes = []
        if speeds:
            text = f"{', '.join(speeds)}, both at once: the best of this run"
            notes.append(("step()'s own ceiling", text))
        if plan.predicted_step_s is not None:
            notes.append(("predicted step()", f"{plan.predicted_step_s:.3f} s at best"))
        notes += self.model.notes() if self.model is not None else []
        notes += self.ranks.notes() if self.ranks is not None else []
        state = f"{size(plan.resident_bytes)} in host memory, {size(plan.disk_bytes)} on disk"
        notes.append(("state", state))
        notes.append(("host pools, peak", size(self.host_peak_bytes)))
        notes += self.process.notes() if self.process is not None else []
        if self.tuned is not None:
            notes.append(("tuned", self.tuned))
        if self.disk_engine:
            notes.append(("disk engine", self.disk_engine))
        for cause, seconds in self.outside.items():
            notes.append((show_part(IN_MODEL + cause), f"{seconds:.3f} s"))
        if not self.fallbacks:
            notes.append(("fall-backs", "none"))
        return notes + [(f"fall-back: {what}", why) for what, why in self.fallbacks.items()]


def _part(seconds: float, whole_s: float) -> str:
    return f"{seconds:.3f} s {seconds / whole_s if whole_s else 0.0:>4.0%}"


def _version() -> str:
    try:
        return importlib.metadata.version("offload")
    except importlib.metadata.PackageNotFoundError:  # it runs from a source tree
        return "unknown"


def _is_plain(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


# --- loggers --------------------------------------------------------------------------------------
# Neither TensorBoard nor Weights & Biases is imported, and neither is needed.


class ScalarWriter(Protocol):
    """The method that TensorBoard's SummaryWriter has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class RunLogger(Protocol):
    """The method that a run of Weights & Biases has, and the module `wandb` itself."""

    def log(self, data: dict[str, float], *, step: int) -> Any: ...


Writer = ScalarWriter | RunLogger


def check_writer(writer: object, what: str) -> None:
    """Raise a `ConfigError` unless numbers can be written there. what: the argument, for the
    message.
    """
    if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
        raise ConfigError(
            f"{what}: expected TensorBoard's SummaryWriter (add_scalar) or a run of W&B (log), got "
            f"{type(writer).__name__}, which has neither"
        )


def log_numbers(writer: Writer, numbers: Mapping[str, float], step: int) -> None:
    """Write all numbers for one step: one by one with `add_scalar` if the writer has it, else at
    once.
    """
    check_writer(writer, "log_to")
    add: Any = getattr(writer, "add_scalar", None)
    if callable(add):
        for name, value in numbers.items():
            add(name, value, step)
    else:
        log: Any = writer.log  # type: ignore[union-attr]
        log(dict(numbers), step=step)
