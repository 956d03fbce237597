"""The numbers of one optimizer step: its times, its seconds by cause, and the bytes it moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepFact:
    """The numbers of one `step()`.

    Times are those of `time.perf_counter`; in a run file, seconds since the first event or step.
    seconds: by cause. counts: bytes and other counters since the previous step.
    """

    number: int
    begin_s: float
    end_s: float
    seconds: dict[str, float]
    counts: dict[str, int]
