"""A measured number, the median of several runs with their spread; the loop that runs them, and the
progress that it shows. Needs no torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from offload.core.errors import StateError
from offload.core.strict_json import printable
from offload.integrations.screen import StatusLine

_BAR = 20


class SurveyPart(StrEnum):
    """A measurement that can be chosen on its own; `--only` takes these values."""

    MEMORY = "memory"
    UPDATE = "update"
    DISK = "disk"
    COPIES = "copies"
    COMPUTE = "compute"
    STEP = "step"


class FigureUnit(StrEnum):
    BYTES_PER_S = "bytes/s"
    FLOPS = "flop/s"
    TOKENS_PER_S = "tokens/s"
    SECONDS = "s"
    SHARE = "share"  # a fraction; 1 is the whole


_SCALES = {  # the unit of the table, and how many of the first it has
    FigureUnit.BYTES_PER_S: ("GB/s", 1e9),
    FigureUnit.FLOPS: ("GFLOP/s", 1e9),
    FigureUnit.TOKENS_PER_S: ("tokens/s", 1.0),
    FigureUnit.SECONDS: ("s", 1.0),
    FigureUnit.SHARE: ("of alone", 1.0),
}


@dataclass(frozen=True)
class Figure:
    """A measured number. spread: half the interquartile range of the runs, in the same unit."""

    name: str
    unit: FigureUnit
    median: float
    spread: float
    runs: int

    @classmethod
    def of(cls, name: str, unit: FigureUnit, each: Sequence[float]) -> Figure:
        """Compute a figure from the results of the runs. Raises `StateError` if there are none."""
        if not each:
            raise StateError(f"{name}: no run has ended; give it more time with --seconds")
        low, _, high = (
            statistics.quantiles(each, n=4, method="inclusive") if each[1:] else [0.0] * 3
        )
        return cls(name, unit, statistics.median(each), (high - low) / 2, len(each))

    def __str__(self) -> str:
        """Format as `3.21 GB/s +- 4% (5 runs)`, in ASCII, which every terminal can show."""
        unit, scale = _SCALES[self.unit]
        share = self.spread / self.median if self.median else 0.0
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        return f"{self.median / scale:.3g} {unit} +- {share:.0%} ({runs})"


class BenchProgress:
    """A progress bar on a terminal; elsewhere a line for each finished figure. Called in the thread
    that measures.
    """

    def __init__(self, line: StatusLine) -> None:
        self.line = line
        self._name = ""

    def begin(self, name: str) -> None:
        """Note that the measurement `name` begins."""
        self._name = printable(name)
        self.line.erase()
        self.at(0.0)

    def at(self, share: float) -> None:
        """Note the progress of the present measurement: `share` of it is done, from 0 to 1."""
        done = round(share * _BAR)
        told, width = f"{share:4.0%} {self._name}", self.line.width
        whole = f"[{'#' * done}{'-' * (_BAR - done)}] {told}"
        self.line.update(whole if width is None or len(whole) <= width else told)

    def done(self, figure: Figure) -> None:
        """Take a result of the present measurement; one measurement may have several."""
        if not self.line.is_terminal:
            self.line.say(f"{printable(figure.name)}: {figure}")


@dataclass(frozen=True)
class Repeats:
    """A number of runs: until `seconds` have passed, at least `least` and at most `most`."""

    seconds: float
    least: int
    most: int


def repeat(
    run: Callable[[], float],
    runs: Repeats,
    at: Callable[[float], None] = lambda share: None,
    warm_up: bool = True,
) -> list[float]:
    """Call `run` as often as `runs` says and return the results. warm_up: make one more call first,
    whose result is dropped. at: receives the progress, from 0 to 1, before each run and at the end.
    """
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


def rate(amount: float, act: Callable[[], object]) -> float:
    """Call `act`, which does so much; return how much it does in a second."""
    begin_s = time.perf_counter()
    act()
    return amount / (time.perf_counter() - begin_s)
