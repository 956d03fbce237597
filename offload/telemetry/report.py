"""The report of a run, for people and for machines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offload.core.config import format_size
from offload.core.metrics import OTHER, MetricsSnapshot, Sample
from offload.core.step_fact import StepFact
from offload.core.timeline import Event
from offload.params.trace import Trace
from offload.planning.planner import Plan, Speeds
from offload.planning.rank_share import RankShare
from offload.planning.shares import Shares
from offload.telemetry.loggers import Writer, log_numbers
from offload.telemetry.recording import RunFacts, make_run

# Bytes by tier and direction: the counter, and the text for people.
MOVES = {
    "disk_read_bytes": "read from disk",
    "disk_written_bytes": "written to disk",
    "spilled_bytes": "gradients written to disk",
    "spilled_read_bytes": "gradients read from disk",
    "device_to_host_bytes": "copied from device to host",
    "host_to_device_bytes": "copied from host to device",
    "updated_bytes": "read and written by the update",
}
# Causes of a step's seconds. All are listed, also those that took none; other causes follow.
CAUSES = {
    "disk read": "waits for disk reads",
    "disk write": "waits for disk writes",
    "device copy": "waits for device copies",
    "network": "waits for other ranks",
    "gradient norm": "gradient norm",
    "update": "update",
    OTHER: "other",
}


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
        known = {"ceiling_seconds": self.ceiling_s, "share_of_ceiling": self.share_of_ceiling}
        return {
            **self.moved,
            "step_seconds": self.step_s,
            **{f"seconds/{_key(cause)}": value for cause, value in self.seconds.items()},
            **{name: value for name, value in known.items() if value is not None},
        }


@dataclass(frozen=True)
class ActivationUse:
    """The saved activations of a model with `activations="offload"`. Hits are storages whose fetch
    was in flight when backward needed them; waits are those of forward and backward passes.
    """

    sent_bytes: int  # offloaded from the memory that is computed in, since the model was prepared
    host_bytes: int  # in host memory now
    disk_bytes: int  # on disk now
    hits: int
    misses: int
    waited_s: float

    def to_dict(self) -> dict[str, float]:
        plain = ("sent_bytes", "host_bytes", "disk_bytes", "hits", "misses")
        return {**{name: getattr(self, name) for name in plain}, "waited_seconds": self.waited_s}

    def __str__(self) -> str:
        size = format_size
        return (
            f"{size(self.sent_bytes)} sent away, {size(self.host_bytes)} in host memory now, "
            f"{size(self.disk_bytes)} on disk; {self.hits} of {self.hits + self.misses} came in "
            f"time, waited {self.waited_s:.3f} s"
        )


@dataclass(frozen=True)
class SharedUse:
    """The traffic of a model that is sharded over ranks. Bytes since it was prepared; sent ones by
    kind: `gather` for parameters (and whole states), `reduce` for gradients, `control` for messages
    between ranks. waited_s: for other ranks, in forward and backward passes.
    """

    rank: int
    count: int
    whole_bytes: int  # that gathered blocks may take
    whole_peak_bytes: int
    gathered_bytes: int
    reduced_bytes: int
    sent_bytes: Mapping[str, int]
    waited_s: float

    def to_dict(self) -> dict[str, float]:
        plain = ("rank", "count", "whole_bytes", "whole_peak_bytes")
        return {
            **{name: getattr(self, name) for name in (*plain, "gathered_bytes", "reduced_bytes")},
            **{f"sent_bytes/{kind}": n for kind, n in self.sent_bytes.items()},
            "waited_seconds": self.waited_s,
        }

    def __str__(self) -> str:
        size = format_size
        sent = ", ".join(f"{kind} {size(n)}" for kind, n in self.sent_bytes.items()) or "nothing"
        return (
            f"rank {self.rank} of {self.count}, stage 3: {size(self.gathered_bytes)} gathered, "
            f"{size(self.reduced_bytes)} of gradients reduced; at most "
            f"{size(self.whole_peak_bytes)} of {size(self.whole_bytes)} whole at a time; sent "
            f"{sent}; waited {self.waited_s:.3f} s"
        )


@dataclass(frozen=True)
class ModelUse:
    """The state of a prepared model: where its bytes are, and the cost of fetching parameters.

    Waits are those of forward and backward passes. round_s: from the end of the step before to that
    of the last one, in which the model waited round_waited_s; None: there were no two steps yet.
    """

    units: int
    param_bytes: int
    shares: Shares  # of host memory, for parameters and all else; taken from the start
    held_bytes: int  # of parameters, in host memory now
    disk_bytes: int  # in use now: parameters, gradients, optimizer state, activations
    depth: int  # units that are prefetched
    hits: int  # blocks that a use had to attach and found in host memory or in flight
    misses: int
    waited_s: float
    round_s: float | None
    round_waited_s: float
    read_bytes_per_s: float | None  # of parameters, lately
    activations: ActivationUse | None = None  # None: they are not offloaded
    shared: SharedUse | None = None  # None: this rank has all of it

    @property
    def memory_bytes(self) -> int:
        """The host memory that parameters may take."""
        return self.shares.params

    @property
    def host_bytes(self) -> int:
        """All host memory that is held for the model and its optimizer."""
        return self.shares.total

    @property
    def hit_rate(self) -> float | None:
        """The share of hits among the blocks that had to be fetched; None if none had to."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    @property
    def stall_share(self) -> float | None:
        """The share of the last whole iteration in which forward and backward waited for
        parameters.
        """
        return self.round_waited_s / self.round_s if self.round_s else None

    def to_dict(self) -> dict[str, float]:
        known = {
            "hit_rate": self.hit_rate,
            "stall_share": self.stall_share,
            "iteration_seconds": self.round_s,
            "read_bytes_per_s": self.read_bytes_per_s,
        }
        plain = ("units", "param_bytes", "memory_bytes", "held_bytes", "hits", "misses")
        offloaded = self.activations.to_dict() if self.activations else {}
        shared = self.shared.to_dict() if self.shared else {}
        return {
            **{name: getattr(self, name) for name in (*plain, "host_bytes", "disk_bytes")},
            **{f"activations/{name}": value for name, value in offloaded.items()},
            **{f"ranks/{name}": value for name, value in shared.items()},
            "prefetch_depth": self.depth,
            "waited_seconds": self.waited_s,
            **{name: value for name, value in known.items() if value is not None},
        }

    def notes(self) -> list[tuple[str, str]]:
        size = format_size
        rate = "none was fetched" if self.hit_rate is None else f"{self.hit_rate:.1%} in time"
        speed = f", read at {self.read_bytes_per_s / 1e9:.3g} GB/s" if self.read_bytes_per_s else ""
        notes = [
            (
                "parameters",
                f"{size(self.param_bytes)} in {self.units} units, {size(self.memory_bytes)} of "
                f"host memory for them, {size(self.held_bytes)} there now",
            ),
            (
                "prefetch",
                f"{self.depth} units ahead, {rate} ({self.hits} of {self.hits + self.misses})"
                f"{speed}",
            ),
        ]
        if self.round_s is not None:
            share = _part(self.round_waited_s, self.round_s)
            notes.append(("last iteration", f"{self.round_s:.3f} s, model waited {share.strip()}"))
        if self.activations is not None:
            notes.append(("activations", str(self.activations)))
        if self.shared is not None:
            notes.append(("ranks", str(self.shared)))
        notes.append(("host memory, taken", self.shares.taken))
        notes.append(("disk, in use", size(self.disk_bytes)))
        return notes


@dataclass(frozen=True)
class RankUse:
    """The traffic of an optimizer whose state is sharded over ranks. sent_bytes: of this rank, by
    kind, since it was wrapped: `gather` for new parameters (and whole states), `reduce` for
    gradients, `control` for messages between ranks.
    """

    share: RankShare
    sent_bytes: Mapping[str, int]

    def to_dict(self) -> dict[str, int]:
        plain = {name: getattr(self.share, name) for name in ("stage", "rank", "count")}
        return {**plain, **{f"sent_bytes/{kind}": n for kind, n in self.sent_bytes.items()}}

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
    facts: RunFacts | None = field(default=None, repr=False, compare=False)
    tuned: str | None = None  # what a profile sets, and which profile

    @property
    def counts(self) -> Mapping[str, int]:
        return self.total.counts

    @property
    def steps(self) -> int:
        return self.counts.get("steps", 0)

    @property
    def disk_read_bytes(self) -> int:
        return self.total.moved["disk_read_bytes"]

    @property
    def disk_written_bytes(self) -> int:
        """The wear of the drives, in bytes."""
        return self.total.moved["disk_written_bytes"]

    def to_dict(self) -> dict[str, Any]:
        """Return flat numbers and texts, for a logger or for JSON. Unknown ones are left out."""
        speeds = {
            "speed/disk_bytes_per_s": self.speeds.disk_bytes_per_s,
            "speed/update_bytes_per_s": self.speeds.update_bytes_per_s,
            "predicted_step_seconds": self.plan.predicted_step_s,
            "disk_engine": self.disk_engine,
        }
        told = {"steps", *MOVES}
        return {
            "steps": self.steps,
            **{f"total/{name}": value for name, value in self.total.to_dict().items()},
            **{f"last_step/{name}": value for name, value in self.last.to_dict().items()},
            **{f"outside/seconds/{_key(cause)}": s for cause, s in self.outside.items()},
            **{f"count/{name}": n for name, n in self.counts.items() if name not in told},
            **{name: value for name, value in speeds.items() if value is not None},
            **{f"model/{k}": v for k, v in (self.model.to_dict() if self.model else {}).items()},
            **{f"ranks/{k}": v for k, v in (self.ranks.to_dict() if self.ranks else {}).items()},
            **{
                f"process/{k}": v
                for k, v in (self.process.to_dict() if self.process else {}).items()
            },
            "state_bytes": self.plan.state_bytes,
            "state_bytes_in_host_memory": self.plan.resident_bytes,
            "state_bytes_on_disk": self.plan.disk_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "fallbacks": len(self.fallbacks),
            **{f"fallback/{_key(what)}": why for what, why in self.fallbacks.items()},
        }

    def log_to(self, writer: Writer, step: int) -> None:
        """Write all numbers to TensorBoard's SummaryWriter, to a run of W&B, or to any object with
        the `add_scalar` of the one or the `log` of the other.
        """
        plain = {k: v for k, v in self.to_dict().items() if isinstance(v, int | float)}
        log_numbers(writer, {f"offload/{name}": value for name, value in plain.items()}, step)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file: for `offload report` (a page), for `offload plan --trace`, and
        as a timeline of the last steps for chrome://tracing or ui.perfetto.dev, with a row for each
        resource. How many steps depends on their chunks: the last 8192 events are kept. Only its
        owner can read the file; an existing one is replaced.
        """
        assert self.facts is not None, "reports of runs have them"
        order = self.trace.uses() if self.trace is not None else ()
        make_run(
            replace(self.facts, order=order),
            self.plan,
            self.events,
            self.samples,
            self.steps_done,
            self.to_dict(),
            self.fallbacks,
        ).save(path)

    def __str__(self) -> str:
        rows = [("", "in all", "last step"), ("steps", str(self.steps), "")]
        rows += [*self._time_rows(), *self._byte_rows(), *self._ceiling_rows()]
        wide = [max(len(row[i]) for row in rows) for i in range(2)]
        table = [f"{name:<{wide[0]}}  {a:>{wide[1]}}  {b:>16}".rstrip() for name, a, b in rows]
        notes = [f"{name:<{wide[0]}}  {text}" for name, text in self._notes()]
        return "\n".join(table + notes)

    def _time_rows(self) -> list[tuple[str, str, str]]:
        both = self.total, self.last
        rows = [("time in step()", f"{self.total.step_s:.3f} s", f"{self.last.step_s:.3f} s")]
        for cause, value in self.total.seconds.items():
            if value >= _SHOWN_S:
                text = [_part(one.seconds.get(cause, 0.0), one.step_s) for one in both]
                rows.append((f"  {CAUSES.get(cause, cause)}", text[0], text[1]))
        return rows

    def _byte_rows(self) -> list[tuple[str, str, str]]:
        return [
            (text, format_size(self.total.moved[name]), format_size(self.last.moved[name]))
            for name, text in MOVES.items()
            if self.total.moved[name] or name == "disk_written_bytes"
        ]

    def _ceiling_rows(self) -> list[tuple[str, str, str]]:
        both = [one.share_of_ceiling for one in (self.total, self.last)]
        texts = ["not known" if share is None else f"{share:.0%}" for share in both]
        return [("share of the ceiling", texts[0], texts[1])]

    def _notes(self) -> list[tuple[str, str]]:
        plan, size = self.plan, format_size
        known = {"disk": self.speeds.disk_bytes_per_s, "update": self.speeds.update_bytes_per_s}
        speeds = [f"{name} at {s / 1e9:.3g} GB/s" for name, s in known.items() if s]
        notes = []
        if speeds:
            notes.append(("ceiling", f"{', '.join(speeds)}, both at once: the best of this run"))
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
            notes.append((f"outside step(): {cause}", f"{seconds:.3f} s"))
        if not self.fallbacks:
            notes.append(("fall-backs", "none"))
        return notes + [(f"fall-back: {what}", why) for what, why in self.fallbacks.items()]


def _part(seconds: float, whole_s: float) -> str:
    return f"{seconds:.3f} s {seconds / whole_s if whole_s else 0.0:>4.0%}"


def _key(name: str) -> str:
    """Return the name as a part of a flat key."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_")
