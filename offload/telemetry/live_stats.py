"""The few numbers of a report that are worth a look while training runs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.core.metrics import COMPUTING, OTHER
from offload.core.step_fact import StepFact
from offload.telemetry.report import Report


@dataclass(frozen=True)
class LiveStats:
    """host_bytes: memory that the engine has taken. disk_bytes: in use now. device_bytes: of this
    process, when it was last looked at; None: there is no device, or it is not watched.
    stall_share: of whole iterations, what their thread waited for drives, copies and ranks; None:
    not two steps yet. step_s: in the last `step()`.
    """

    steps: int
    device_bytes: int | None
    host_bytes: int
    disk_bytes: int
    stall_share: float | None
    step_s: float
    read_bytes: int  # from disk, in the last step() and the passes before it
    written_bytes: int
    hit_rate: float | None  # of parameters that had to come; None: none had to
    depth: int | None  # units that are fetched ahead; None: the model is not prepared
    fallbacks: int

    @classmethod
    def of(cls, told: Report, steps_before: int = 0) -> LiveStats:
        """steps_before: the stall share is that of the steps since then, at least of the last."""
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
        """Flat, for a log. What is not known is not there."""
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
    """Of the time from one step's end to the last one's: what was waited, in `step()` and passes.

    From the end of the last step whose number is at most `steps_before`, or of the one before the
    last. None: there are no two steps.
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
    """Causes are named `where: what`; those that compute are no waits."""
    return sum(
        s
        for cause, s in step.seconds.items()
        if cause.partition(": ")[2] not in COMPUTING | {OTHER}
    )
