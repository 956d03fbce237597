"""One measured number: the median of some runs, and how far they lie apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from offload.core.errors import StateError


class FigureUnit(Enum):
    BYTES_PER_S = "bytes/s"
    FLOPS = "flop/s"
    TOKENS_PER_S = "tokens/s"
    SECONDS = "s"
    SHARE = "share"  # of something: 1 is all of it


@dataclass(frozen=True)
class Figure:
    """spread: half of the middle half's width, in the same unit."""

    name: str
    unit: FigureUnit
    median: float
    spread: float
    runs: int

    @classmethod
    def of(cls, name: str, unit: FigureUnit, each: Sequence[float]) -> Figure:
        """Raises `StateError` where no run has given a number."""
        if not each:
            raise StateError(f"{name}: no run has ended; give it more time with --seconds")
        low, _, high = (
            statistics.quantiles(each, n=4, method="inclusive") if each[1:] else [0.0] * 3
        )
        return cls(name, unit, statistics.median(each), (high - low) / 2, len(each))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit.value,
            "median": self.median,
            "spread": self.spread,
            "runs": self.runs,
        }


class Listener(Protocol):
    """Somebody who watches measurements. Called in the thread that measures."""

    def begin(self, name: str) -> None:
        """Another measurement."""

    def at(self, share: float) -> None:
        """So much of it is done; from 0 to 1."""

    def done(self, figure: Figure) -> None:
        """What came of it, or of a part of it."""


@dataclass(frozen=True)
class Repeats:
    """How often something is done: until the seconds are over, within these bounds."""

    seconds: float
    least: int
    most: int


def repeat(
    run: Callable[[], float], runs: Repeats, at: Callable[[float], None], warm_up: bool = True
) -> list[float]:
    """What each run has returned, but for the first one if that warms up."""
    if warm_up:
        run()
    begin_s, each = time.perf_counter(), list[float]()
    while len(each) < runs.most:
        spent = (time.perf_counter() - begin_s) / runs.seconds
        if spent >= 1 and len(each) >= runs.least:
            break
        at(min(1.0, max(spent, len(each) / runs.most)))
        each.append(run())
    at(1.0)
    return each
