"""The parts of a report: what steps move and what their time goes to; what a prepared model, the
ranks and the process use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.core.budget import HOST
from offload.core.config import format_size
from offload.core.heap import HEAP
from offload.core.metrics import MetricsSnapshot
from offload.core.timeline import OTHER
from offload.distributed.consensus import NETWORK
from offload.params.gathered_tier import GatheredTier
from offload.params.prepared import Prepared
from offload.planning.shares import Shares
from offload.planning.state_plan import RankShare
from offload.telemetry.words import MOVES, as_numbers, below, flat_key, show_rate

# Causes of a step's seconds. All are listed, also those that took none; other causes follow.
CAUSES = ("disk read", "disk write", "device copy", "network", "gradient norm", "update", OTHER)
_WAITS = ("parameter read", "parameter write", "device copy", NETWORK)
_ACTIVATION_WAITS = ("activation read", "activation write")


@dataclass(frozen=True)
class Account:
    """The bytes that some steps have moved, and the causes of their time; the seconds add up to the
    time in `step()`.
    """

    counts: Mapping[str, int]
    seconds: dict[str, float]

    @classmethod
    def of(cls, snapshot: MetricsSnapshot) -> Account:
        seconds = {cause: snapshot.seconds.get(cause, 0.0) for cause in CAUSES}
        return cls(dict(snapshot.counts), {**seconds, **snapshot.seconds})

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def moved(self) -> dict[str, int]:
        """Bytes by tier and direction."""
        return {name: self.counts.get(name, 0) for name in MOVES}

    def to_dict(self) -> dict[str, float]:
        return {
            **self.moved,
            "step_seconds": self.step_s,
            **{f"seconds/{flat_key(cause)}": value for cause, value in self.seconds.items()},
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

    @classmethod
    def of(cls, made: Prepared, total: MetricsSnapshot) -> ActivationUse | None:
        """Return None if the model's activations are not offloaded."""
        assert made.engine is not None
        kept, count = made.engine.activations, total.counts.get
        if kept is None:
            return None
        return cls(
            sent_bytes=count("activations_offloaded_bytes", 0),
            host_bytes=kept.host_bytes,
            disk_bytes=kept.disk_bytes,
            hits=count("activation_hits", 0),
            misses=count("activation_misses", 0),
            waited_s=_waited_s(total, _ACTIVATION_WAITS),
        )

    def to_dict(self) -> dict[str, float]:
        return as_numbers(self, *self.__dataclass_fields__)

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

    @classmethod
    def of(cls, made: Prepared, total: MetricsSnapshot) -> SharedUse | None:
        """Return None if this rank has all of the model."""
        assert made.engine is not None
        tier = made.engine.residency.tier
        if made.ranks is None or not isinstance(tier, GatheredTier):
            return None
        return cls(
            *made.ranks.place,
            whole_bytes=tier.budget_bytes,
            whole_peak_bytes=tier.peak_bytes,
            gathered_bytes=total.counts.get("gathered_bytes", 0),
            reduced_bytes=total.counts.get("reduced_bytes", 0),
            sent_bytes=dict(made.ranks.sent_bytes),
            waited_s=_waited_s(total, [NETWORK]),
        )

    def to_dict(self) -> dict[str, float]:
        plain = (name for name in self.__dataclass_fields__ if name != "sent_bytes")
        return {**as_numbers(self, *plain), **below("sent_bytes", self.sent_bytes)}

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

    waited_s: of forward and backward passes. hits: blocks that a use had to attach and found in
    host memory or in flight. Both since the model was prepared.
    """

    units: int
    param_bytes: int
    shares: Shares  # of host memory, for parameters and all else; taken from the start
    held_bytes: int  # of parameters, in host memory now
    disk_bytes: int  # in use now: parameters, gradients, optimizer state, activations
    depth: int  # units that are prefetched
    hits: int
    misses: int
    waited_s: float
    read_bytes_per_s: float | None  # of parameters, lately
    activations: ActivationUse | None = None  # None: they are not offloaded
    shared: SharedUse | None = None  # None: this rank has all of it

    @classmethod
    def of(cls, made: Prepared, total: MetricsSnapshot) -> ModelUse:
        """Collect what a prepared model uses."""
        assert made.engine is not None
        residency, activations = made.engine.residency, ActivationUse.of(made, total)
        stored_bytes = sum(store.stats().used_bytes for store in made.stores)
        on_disk_bytes = stored_bytes + made.shares.gradients_on_disk
        return cls(
            units=len(made.units),
            param_bytes=sum(map(made.prepare_plan.host_bytes_of, made.units)),
            shares=made.shares,
            held_bytes=sum(b.nbytes for b in residency.blocks if b.memory is not None),
            disk_bytes=on_disk_bytes + (activations.disk_bytes if activations is not None else 0),
            depth=residency.prefetch.depth,
            hits=total.counts.get("parameter_hits", 0),
            misses=total.counts.get("parameter_misses", 0),
            waited_s=_waited_s(total, _WAITS),
            read_bytes_per_s=residency.prefetch.read_bytes_per_s,
            activations=activations,
            shared=SharedUse.of(made, total),
        )

    @property
    def memory_bytes(self) -> int:
        """The host memory that parameters may take."""
        return self.shares.params

    @property
    def host_bytes(self) -> int:
        """All host memory that is held for the model and its optimizer."""
        return self.shares.total

    def to_dict(self) -> dict[str, Any]:
        plain = ("units", "param_bytes", "memory_bytes", "held_bytes")
        return {
            **as_numbers(self, *plain, "hits", "misses", "waited_s", "read_bytes_per_s"),
            "prefetch_depth": self.depth,
            **below("activations", self.activations),
            **below("ranks", self.shared),
        }

    def notes(self) -> list[tuple[str, str]]:
        size, rate = format_size, self.read_bytes_per_s
        fetched = f", read at {show_rate(rate)}" if rate else ""
        fetched = fetched if self.hits + self.misses else ", none was fetched"
        notes = [
            (
                "parameters",
                f"{size(self.param_bytes)} in {self.units} units, {size(self.memory_bytes)} of "
                f"host memory for them, {size(self.held_bytes)} there now",
            ),
            ("prefetch", f"{self.depth} units ahead{fetched}"),
        ]
        if self.activations is not None:
            notes.append(("activations", str(self.activations)))
        if self.shared is not None:
            notes.append(("ranks", str(self.shared)))
        notes.append(("host memory, taken", self.shares.taken))
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

    @classmethod
    def now(cls) -> ProcessUse | None:
        """Return None if it is not known, or if the process had more memory before."""
        base, peak = HEAP.base_bytes, HEAP.peak_bytes()
        return None if base is None or peak is None else cls(base, HOST.peak_bytes, peak)

    @property
    def beyond_bytes(self) -> int:
        """The bytes of the peak that the engine's account does not explain."""
        return max(0, self.peak_bytes - self.base_bytes - self.engine_bytes)

    def to_dict(self) -> dict[str, int]:
        plain = as_numbers(self, "base_bytes", "engine_bytes", "peak_bytes")
        return {**plain, "beyond_books_bytes": self.beyond_bytes}


def _waited_s(snapshot: MetricsSnapshot, causes: Iterable[str]) -> float:
    """Sum the seconds that forward and backward passes waited for these causes."""
    return sum(snapshot.outside.get(cause, 0.0) for cause in causes)
