"""The facts and numbers from which a run's key figures and hints are made, the same from a report
and from the file of a run. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.core.config import format_size
from offload.core.timeline import IN_MODEL, IN_STEP
from offload.telemetry.iterations import IterationSummary
from offload.telemetry.run_file import About, Run


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run. about: of it only what a report has without a file. numbers: those of the
    report, `Report.to_dict()`.
    """

    about: About
    numbers: Mapping[str, Any]
    fallbacks: Mapping[str, str]
    found: IterationSummary

    @classmethod
    def of(cls, run: Run) -> RunFacts:
        return cls(run.about, run.about.numbers, run.about.fallbacks, run.iterations)

    def number(self, name: str) -> int:
        return int(self.numbers.get(name, 0))

    def waited_s(self, causes: Sequence[str]) -> float:
        """Return the seconds of an iteration that were waited for these causes, wherever."""
        places = (place + cause for place in (IN_STEP, IN_MODEL) for cause in causes)
        return sum(self.found.parts.get(part, 0.0) for part in places)

    def moved(self, *names: str) -> str:
        """Return the bytes that an iteration moves, of these counters together."""
        return format_size(round(sum(self.found.moved.get(f"{n}_bytes", 0.0) for n in names)))

    @property
    def state_away(self) -> int:
        return self.number("state_bytes_on_disk")

    @property
    def params_away(self) -> int:
        """The bytes of parameters that host memory has no room for."""
        return max(0, self.number("model/param_bytes") - self.number("model/memory_bytes"))

    @property
    def gradients_away(self) -> int:
        return self.about.shares.get("gradients on disk", 0)

    @property
    def largest_unit(self) -> int:
        return max((unit.nbytes for unit in self.about.units), default=0)
