"""The numbers of one optimizer step: its times, its seconds by cause, and the bytes it moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Where the seconds of a step were spent, before their cause: in `step()`, or since the step before.
IN_STEP: Final = "step(): "
IN_MODEL: Final = "model: "
OTHER: Final = "other"
COMPUTING: Final = frozenset(
    {"update", "gradient norm", "state in", "state out"}
)  # the other causes are waits


@dataclass(frozen=True)
class StepFact:
    """The numbers of one `step()`.

    Times are those of `time.perf_counter`; in a run file, seconds since the first event or step.
    seconds: by place and cause. counts: bytes and other counters since the previous step.
    """

    number: int
    begin_s: float
    end_s: float
    seconds: dict[str, float]
    counts: dict[str, int]
