"""The few numbers of a report that are worth watching while training runs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.core.metrics import COMPUTING, OTHER
from offload.core.step_fact import StepFact
from offload.telemetry.report import Report


@dataclass(frozen=True)
class LiveStats:
    """The live statistics of a run.

    host_bytes: host memory that the engine has taken.
    disk_bytes: bytes of the drives in use now.
    device_bytes: device memory of this process, when it was last sampled; None: there is no device,
    or it is not sampled.
    stall_share: the share of whole iterations in which their thread waited for drives, copies and
    ranks; None: no two steps yet.
    step_s: time in the last `step()`.
    """

    steps: int
    device_bytes: int | None
    host_bytes: int
    disk_bytes: int
    stall_share: float | None
    step_s: float
    read_bytes: int  # from disk, in the last step() and the passes before it
    written_bytes: int
    hit_rate: float | None  # of blocks that had to be fetched; None: none had to
    depth: int | None  # units that are prefetched; None: the model is not prepared
    fallbacks: int

    @classmethod
    def of(cls, told: Report, steps_before: int = 0) -> LiveStats:
        """Take the statistics from a report. steps_before: the stall share is that of the steps
        with higher numbers, at least of the last.
        """
        model, plan = told.model, told.plan
        counts = told.steps_done[-1].counts if told.steps_done else {}
        newest = told.samples[-1].nbytes if told.samples else {}
        return cls(
            steps=told.steps,
            device_bytes=newest.get("device"),
            host_bytes=plan.arena_bytes if model is None else model.host_bytes,
            disk_bytes=plan.disk_bytes if model is None else model.disk_bytes,
            stall_share=stall_share(told.steps_done, steps_before),
            step_s=told.last.step_s,
            read_bytes=counts.get("disk_read_bytes", 0),
            written_bytes=counts.get("disk_written_bytes", 0),
            hit_rate=None if model is None else model.hit_rate,
            depth=None if model is None else model.depth,
            fallbacks=len(told.fallbacks),
        )

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as a flat dict, for a log. Unknown ones are left out."""
        numbers = {
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "stall_share": self.stall_share,
            "step_seconds": self.step_s,
            "disk_read_bytes": self.read_bytes,
            "disk_written_bytes": self.written_bytes,
            "hit_rate": self.hit_rate,
            "prefetch_depth": self.depth,
            "fallbacks": self.fallbacks,
        }
        return {name: value for name, value in numbers.items() if value is not None}


def stall_share(steps: Sequence[StepFact], steps_before: int = 0) -> float | None:
    """Return the share of the time from one step's end to the last one's in which the thread
    waited, in `step()` and in passes.

    The time begins at the end of the last step whose number is at most `steps_before`, at the
    latest of the one before the last; if all have higher numbers, at the end of the first. None:
    there are no two steps.
    """
    if len(steps) < 2:
        return None
    first = len(steps) - 2
    while first > 0 and steps[first].number > steps_before:
        first -= 1
    spent_s = steps[-1].end_s - steps[first].end_s
    waited_s = sum(map(_waited_s, steps[first + 1 :]))
    return min(1.0, waited_s / spent_s) if spent_s > 0 else None


def _waited_s(step: StepFact) -> float:
    """Sum the seconds of a step's waits. Causes are named `where: what`; those that compute are no
    waits.
    """
    return sum(
        s
        for cause, s in step.seconds.items()
        if cause.partition(": ")[2] not in COMPUTING | {OTHER}
    )
