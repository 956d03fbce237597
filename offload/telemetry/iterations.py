"""The iterations of a run in numbers, for the report, the page, the progress line and logs: each of
them shows what is computed here.

An iteration goes from the end of one `step()` to the end of the next, so the first step of a run,
in which the engine also records the trace and fills the tiers, has none. The time of an iteration
is the median. Shares are those of all iterations together, less those that took more than three
times the median: the loop evaluated or saved in them. The seconds of a part are its share of the
median, so that the parts add up to the time that is shown. Pure functions; need no torch.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any, Final

from offload.core.timeline import COMPUTING, IN_STEP, OTHER, StepFact

OUTSIDE: Final = "outside"  # of step(): forward, backward, and all that the loop does
TOKENS: Final = "tokens"  # the counter of those in the batches, where the loop tells them
_LONG: Final = 3  # times the median


@dataclass(frozen=True)
class Iteration:
    """An iteration in numbers. total_s: None for the first step of a run, which no other precedes.
    seconds: by place and cause, as in `StepFact`; those in `step()` alone where `total_s` is None.
    """

    number: int
    total_s: float | None
    step_s: float
    seconds: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def whole_s(self) -> float:
        """The seconds of the iteration, or those of `step()` where only these are known."""
        return self.step_s if self.total_s is None else self.total_s

    @property
    def waited_s(self) -> float:
        return min(sum(s for cause, s in self.seconds.items() if is_wait(cause)), self.whole_s)

    @property
    def computed_in_step_s(self) -> float:
        in_step = (cause for cause in self.seconds if cause.startswith(IN_STEP))
        waited_s = sum(self.seconds[cause] for cause in in_step if is_wait(cause))
        return max(0.0, self.step_s - waited_s)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by place and cause, which add up to `whole_s`. Outside of `step()` all that
        is not waiting is the model's, the loader's and the loop's own.
        """
        if self.total_s is None:
            return dict(self.seconds)
        return {OUTSIDE: max(0.0, self.whole_s - sum(self.seconds.values())), **self.seconds}

    @property
    def disk_bytes(self) -> int:
        return self.counts.get("disk_read_bytes", 0) + self.counts.get("disk_written_bytes", 0)


def iterations_of(steps: Sequence[StepFact]) -> Iterator[Iteration]:
    """Yield the iteration that each step ends. Takes one step at a time from `steps`, which may be
    a long log that makes them on access.
    """
    ended_s: float | None = None
    for at in range(len(steps)):
        step = steps[at]
        step_s = max(0.0, step.end_s - step.begin_s)
        total_s = None if ended_s is None else max(step_s, step.end_s - ended_s)
        seconds = {
            cause: s
            for cause, s in step.seconds.items()
            if total_s is not None or cause.startswith(IN_STEP)
        }
        yield Iteration(step.number, total_s, step_s, seconds, step.counts)
        ended_s = step.end_s


def is_wait(cause: str) -> bool:
    """Return whether `cause`, given with its place, is a wait."""
    return cause != OUTSIDE and cause.partition(": ")[2] not in COMPUTING | {OTHER}


@dataclass(frozen=True)
class IterationSummary:
    """The summary of a run's iterations. Bytes and seconds are those of an iteration, or of
    `step()` alone where `is_whole` is False because there was one step only.

    least_s: the lower bound of an iteration: its seconds of computing, or those that the disk needs
    for its bytes at the best rate of this run. limit: which of the two. Hit rates are those of the
    iterations; of the whole run where none of them fetched a block.
    """

    steps: int
    is_whole: bool
    left_out: int  # number of iterations that took more than `_LONG` medians
    typical_s: float | None  # median
    span_s: tuple[float, float]  # shortest and longest
    step_s: float | None  # median of step() alone
    tokens_per_s: float | None  # None: the loop does not tell its tokens
    stall_share: float | None
    parts: Mapping[str, float]  # of `typical_s`, by place and cause: computing, then waits
    least_s: float | None
    limit: str
    hit_rate: float | None
    device_hit_rate: float | None
    moved: Mapping[str, float]  # mean bytes by counter

    @classmethod
    def of(cls, steps: Sequence[StepFact], numbers: Mapping[str, Any]) -> IterationSummary:
        """Summarize the steps of a run. numbers: those of its report, `Report.to_dict()`."""
        first = 1 if len(steps) > 1 else 0  # before the first whole iteration
        whole_s, step_s, computed_s, moved, tokens = (array("d") for _ in range(5))
        for one in islice(iterations_of(steps), first, None):
            whole_s.append(one.whole_s)
            step_s.append(one.step_s)
            computed_s.append(one.whole_s - one.waited_s)
            moved.append(one.disk_bytes)
            tokens.append(one.counts.get(TOKENS, 0))
        typical_s = median(whole_s) if whole_s else None
        parts, counts, count, total_s, waited_s = Counter[str](), Counter[str](), 0, 0.0, 0.0
        for one in islice(iterations_of(steps), first, None):
            if typical_s is None or one.whole_s > _LONG * typical_s:
                continue
            count, total_s, waited_s = count + 1, total_s + one.whole_s, waited_s + one.waited_s
            parts.update(one.parts)
            counts.update(one.counts)
        least_s, limit = _least(whole_s, computed_s, moved, numbers)
        return cls(
            steps=len(steps),
            is_whole=first == 1,
            left_out=len(whole_s) - count,
            typical_s=typical_s,
            span_s=(min(whole_s, default=0.0), max(whole_s, default=0.0)),
            step_s=median(step_s) if step_s else None,
            tokens_per_s=_rate(median(tokens), typical_s) if first and tokens else None,
            stall_share=waited_s / total_s if total_s else None,
            parts=_shares(parts, (typical_s or 0.0) / total_s if total_s else 0.0),
            least_s=least_s,
            limit=limit,
            hit_rate=hit_rate(counts, "parameter", numbers),
            device_hit_rate=hit_rate(counts, "device", numbers),
            moved={name: n / count for name, n in counts.items() if name.endswith("_bytes")},
        )

    @property
    def stalls(self) -> dict[str, float]:
        """The waits of `parts`, the largest first."""
        return {name: s for name, s in self.parts.items() if is_wait(name)}

    @property
    def share_of_ceiling(self) -> float | None:
        """The lower bound over the typical time; 1 is the most that this hardware allows."""
        if self.least_s is None or not self.typical_s:
            return None
        return min(1.0, self.least_s / self.typical_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary for JSON. Unknown values are None."""
        return {
            "steps": self.steps,
            "iteration_is_whole": self.is_whole,
            "iteration_seconds": self.typical_s,
            "step_seconds": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "stall_share": self.stall_share,
            "seconds": dict(self.parts),
            "stall_seconds": self.stalls,
            "least_seconds": self.least_s,
            "limit": self.limit,
            "share_of_ceiling": self.share_of_ceiling,
            "hit_rate": self.hit_rate,
            "device_hit_rate": self.device_hit_rate,
            "bytes": dict(self.moved),
        }


def recent(steps: Sequence[StepFact], steps_before: int = 0) -> IterationSummary:
    """Summarize the iterations that end in steps with numbers above `steps_before`, at least the
    last one.
    """
    first = max(0, len(steps) - 2)
    while first > 0 and steps[first].number > steps_before:
        first -= 1
    return IterationSummary.of(steps[first:], {})


def _least(
    whole_s: Sequence[float],
    computed_s: Sequence[float],
    moved: Sequence[float],
    numbers: Mapping[str, Any],
) -> tuple[float | None, str]:
    """Return the lower bound of a typical iteration, and its cause: the seconds that it computes,
    or those that the disk needs for its bytes. Both are medians, as the typical time is: each
    iteration takes at least as long as its own, so the median one does.
    """
    if not whole_s:
        return None, ""
    rates = [nbytes / s for nbytes, s in zip(moved, whole_s, strict=True) if s]
    # An iteration may exceed the measured speed.
    best = max([numbers.get("speed/disk_bytes_per_s", 0.0), *rates])
    least_s, disk_s = median(computed_s), median(moved) / best if best else 0.0
    return (least_s, "computing") if least_s >= disk_s else (disk_s, "the disk")


def _shares(parts: Mapping[str, float], factor: float) -> dict[str, float]:
    """Scale the parts and sort them: computing, then waits, the largest first."""
    ordered = sorted(parts.items(), key=lambda part: (is_wait(part[0]), -part[1]))
    return {name: seconds * factor for name, seconds in ordered}


def _rate(amount: float, seconds: float | None) -> float | None:
    return amount / seconds if amount and seconds else None


def hit_rate(
    counts: Mapping[str, int], kind: str, numbers: Mapping[str, Any] | None = None
) -> float | None:
    """Return the share of blocks that were resident when needed; None where none was needed. kind:
    the start of the counters' names: "parameter" or "device". numbers: those of the report, for the
    whole run, if `counts` has none.
    """
    hits, misses = (counts.get(f"{kind}_{what}", 0) for what in ("hits", "misses"))
    if not hits + misses and numbers:
        hits, misses = (numbers.get(f"count/{kind}_{what}", 0) for what in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None
