"""The summary of a run: seconds and bytes of an iteration, and the causes of its waits.

An iteration goes from the end of one `step()` to the end of the next, so the first step of a run,
in which the engine also records the trace and fills the tiers, has none. Shares are those of all
iterations together, less those that took more than three times the median: the loop evaluated or
saved in them. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from offload.core.step_fact import StepFact
from offload.telemetry.run_file import Run
from offload.tools.html_report.memory import MemoryBands, tiers_of

# Causes as the engine writes them: `optim/step_stats.py` and `core/metrics.py`, which need torch.
IN_STEP: Final = "step(): "
IN_MODEL: Final = "model: "
OTHER: Final = "other"
OUTSIDE: Final = "outside"  # of step(): forward, backward, and all that the loop does
COMPUTED: Final = frozenset({"update", "gradient norm", "state in", "state out"})
_LONG: Final = 3  # times the median


@dataclass(frozen=True)
class IterationSummary:
    """An iteration in numbers. total_s: None for the first step of a run, which no other precedes.
    waits, computed: seconds by place and cause, as in `StepFact`; computed are those in `step()`.
    """

    number: int
    total_s: float | None
    step_s: float
    waits: Mapping[str, float]
    computed: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def whole_s(self) -> float:
        """The seconds of the iteration, or those of `step()` where only these are known."""
        return self.step_s if self.total_s is None else self.total_s

    @property
    def waited_s(self) -> float:
        return min(sum(self.waits.values()), self.whole_s)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by place and cause, which add up to `whole_s`. Outside of `step()` all that
        is not waiting is the model's, the loader's and the loop's own.
        """
        told = {**self.computed, **self.waits}
        rest_s = max(0.0, self.whole_s - sum(told.values()))
        return told if self.total_s is None else {OUTSIDE: rest_s, **told}


@dataclass(frozen=True)
class Summary:
    """The summary of a run. Bytes, seconds and hits are those of an iteration, or of `step()` alone
    where `is_whole` is False because there was one step only.

    least_s: the lower bound of an iteration: its seconds of computing, or those that the disk needs
    for its bytes at the best rate of this run. limit: which of the two.
    """

    iterations: tuple[IterationSummary, ...]
    is_whole: bool
    left_out: int  # number of iterations that took more than `_LONG` medians
    typical_s: float | None  # median
    mean_s: float | None  # parts and bytes are means, too
    step_s: float | None  # median of step() alone
    stall_share: float | None
    parts: Mapping[str, float]  # mean seconds by place and cause: computing, then waits
    stalls: Mapping[str, float]  # the waits of `parts`, the largest first
    least_s: float | None
    limit: str
    hit_rate: float | None
    device_hit_rate: float | None
    moved: Mapping[str, float]  # mean bytes by counter
    tiers: tuple[MemoryBands, ...]

    @property
    def share_of_ceiling(self) -> float | None:
        """The lower bound over the typical time; 1 is the most that this hardware allows."""
        if self.least_s is None or not self.typical_s:
            return None
        return min(1.0, self.least_s / self.typical_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary for JSON. Unknown values are None."""
        tiers = {
            tier.name: {"peak_bytes": tier.peak_bytes, "budget_bytes": tier.budget_bytes}
            for tier in self.tiers
        }
        return {
            "steps": len(self.iterations),
            "iteration_is_whole": self.is_whole,
            "iteration_seconds": self.typical_s,
            "step_seconds": self.step_s,
            "stall_share": self.stall_share,
            "seconds": dict(self.parts),
            "stall_seconds": dict(self.stalls),
            "least_seconds": self.least_s,
            "limit": self.limit,
            "share_of_ceiling": self.share_of_ceiling,
            "hit_rate": self.hit_rate,
            "device_hit_rate": self.device_hit_rate,
            "bytes": dict(self.moved),
            "memory": tiers,
        }


def summarize(run: Run) -> Summary:
    iterations = iterations_of(run.about.steps)
    whole = [one for one in iterations if one.total_s is not None]
    known = whole or list(iterations)
    typical_s = median([one.whole_s for one in known]) if known else None
    steady = [one for one in known if typical_s is None or one.whole_s <= _LONG * typical_s]
    total_s = sum(one.whole_s for one in steady)
    waited_s = sum(one.waited_s for one in steady)
    moved = _means([one.counts for one in steady])
    parts = _means([one.parts for one in steady])
    waits = [name for name in _largest_first(parts) if is_wait(name)]
    rest = [name for name in _largest_first(parts) if not is_wait(name)]
    least_s, limit = _least(known, run.about.numbers.get("speed/disk_bytes_per_s"))
    return Summary(
        iterations=iterations,
        is_whole=bool(whole),
        left_out=len(known) - len(steady),
        typical_s=typical_s,
        mean_s=total_s / len(steady) if steady else None,
        step_s=median([one.step_s for one in known]) if known else None,
        stall_share=waited_s / total_s if total_s else None,
        parts={name: parts[name] for name in (*rest, *waits)},
        stalls={name: parts[name] for name in waits},
        least_s=least_s,
        limit=limit,
        hit_rate=hit_rate(moved, "parameter"),
        device_hit_rate=hit_rate(moved, "device"),
        moved={name: value for name, value in moved.items() if name.endswith("_bytes")},
        tiers=tiers_of(run),
    )


def iterations_of(steps: Sequence[StepFact]) -> tuple[IterationSummary, ...]:
    found: list[IterationSummary] = []
    ended_s: float | None = None
    for step in steps:
        step_s = max(0.0, step.end_s - step.begin_s)
        total_s = None if ended_s is None else max(step_s, step.end_s - ended_s)
        known = {
            cause: seconds
            for cause, seconds in step.seconds.items()
            if total_s is not None or cause.startswith(IN_STEP)
        }
        waits = {cause: seconds for cause, seconds in known.items() if is_wait(cause)}
        computed = {cause: seconds for cause, seconds in known.items() if cause not in waits}
        found.append(IterationSummary(step.number, total_s, step_s, waits, computed, step.counts))
        ended_s = step.end_s
    return tuple(found)


def is_wait(cause: str) -> bool:
    """Return whether `cause`, given with its place, is a wait."""
    return cause != OUTSIDE and cause.removeprefix(IN_STEP) not in COMPUTED | {OTHER}


def _least(
    known: Sequence[IterationSummary], disk_bytes_per_s: float | None
) -> tuple[float | None, str]:
    """Return the lower bound of a typical iteration, and its cause: the seconds that it computes,
    or those that the disk needs for its bytes. Both are medians, as the typical time is: each
    iteration takes at least as long as its own, so the median one does.
    """
    if not known:
        return None, ""
    computed_s = median([one.whole_s - one.waited_s for one in known])
    moved = [_disk_bytes(one) for one in known]
    rates = [n / one.whole_s for n, one in zip(moved, known, strict=True) if one.whole_s]
    best = max([disk_bytes_per_s or 0.0, *rates])  # an iteration may exceed the measured speed
    disk_s = median(moved) / best if best else 0.0
    return (computed_s, "computing") if computed_s >= disk_s else (disk_s, "the disk")


def _disk_bytes(one: IterationSummary) -> int:
    return one.counts.get("disk_read_bytes", 0) + one.counts.get("disk_written_bytes", 0)


def hit_rate(counts: Mapping[str, float], kind: str) -> float | None:
    """Return the share of blocks that were resident when needed; None where none was needed. kind:
    "parameter" or "device".
    """
    hits, misses = (counts.get(f"{kind}_{what}", 0.0) for what in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None


def _means(all_of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for one in all_of:
        for name, value in one.items():
            sums[name] += value  # type: ignore[assignment]  # a Counter of floats
    return {name: value / len(all_of) for name, value in sums.items()}


def _largest_first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
