"""One optimizer step as numbers: when it was, what it waited for, and what it moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepFact:
    """One `step()`. Times in seconds since the first event or step of the file. seconds: by cause.
    counts: bytes and the like since the step before.
    """

    number: int
    begin_s: float
    end_s: float
    seconds: dict[str, float]
    counts: dict[str, int]
