"""The unit that an event belongs to, and the cost of each unit in an iteration. Pure functions.

The timeline names acts, not units: `forward 3: blocks.2`, `parameter read: blocks.2`,
`state chunk 7: group 0 param 4 (64, 64)[0:512] and 2 more`. A chunk belongs to the unit of its
first parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from offload.core.timeline import (
    COMPUTE,
    DISK_READS,
    DISK_WRITES,
    STEP,
    TO_DEVICE,
    TO_HOST,
    UPDATE,
    WAITING,
    Event,
)
from offload.telemetry.run_file import About, Run

_MORE = re.compile(r" and \d+ more$")
_SLICE = re.compile(r"\[\d+:\d+\]$")


class HtmlReportUnits:
    """A lookup of unit numbers by the names of events; None: the event belongs to no unit."""

    def __init__(self, about: About) -> None:
        self._units = [unit.name for unit in about.units]
        self._by_name = {name: number for number, name in reversed([*enumerate(self._units)])}
        self._by_param = {param.name: param.unit for param in about.params}
        self._found: dict[str, int | None] = {}

    def find(self, name: str) -> int | None:
        if name not in self._found:
            self._found[name] = self._look(name)
        return self._found[name]

    def _look(self, name: str) -> int | None:
        head, _, what = name.partition(": ")
        number = head.rpartition(" ")[2]
        if _is_number(number) and self._units[int(number) :][:1] == [what]:
            return int(number)
        what = what or name
        if what in self._by_name:
            return self._by_name[what]
        return self._by_param.get(_SLICE.sub("", _MORE.sub("", what)))


def _is_number(text: str) -> bool:
    """Return whether `text` may be a unit's number. Longer digits are none, and slow to convert."""
    return text.isdecimal() and len(text) < 10


@dataclass
class UnitCost:
    """The cost of one unit in an iteration, by kind of event: seconds, bytes moved, and number of
    acts, summed event by event.
    """

    name: str
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    acts: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, event: Event, share: float) -> None:
        """Add an event. share: one over the number of iterations."""
        spent_s = (event.end_s - event.begin_s) * share
        self.seconds[kind] = self.seconds.get(kind, 0.0) + spent_s
        self.moved[kind] = self.moved.get(kind, 0.0) + event.nbytes * share
        self.acts[kind] = self.acts.get(kind, 0.0) + share


def kind_of(event: Event) -> str:
    """Return the kind of an event, which sets its colour: compute by phase, all else by row."""
    if event.row == COMPUTE:
        phase = event.name.partition(" ")[0]
        return phase if phase in ("forward", "backward") else "evaluation"
    kinds = {
        STEP: "step",
        UPDATE: "update",
        WAITING: "waiting",
        DISK_READS: "read",
        DISK_WRITES: "write",
        TO_DEVICE: "to-device",
        TO_HOST: "to-host",
    }
    return kinds[event.row]


def whole_iterations(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return begin and end of each iteration that the timeline holds in full: from the end of one
    step to the end of the next.
    """
    ends_s = sorted(event.end_s for event in events if event.row == STEP)
    return [*pairwise(ends_s)]


def typical_iteration(events: Sequence[Event]) -> tuple[float, float] | None:
    """Return begin and end of the iteration whose time is nearest to the median; of equals the
    last. None: the timeline has no whole iteration.
    """
    whole = whole_iterations(events)
    if not whole:
        return None
    middle_s = median(end_s - begin_s for begin_s, end_s in whole)
    return min(reversed(whole), key=lambda one: abs(one[1] - one[0] - middle_s))


def costs_of(run: Run) -> list[UnitCost]:
    """Return each unit's cost, means over the iterations of the timeline; empty without units."""
    costs = [UnitCost(unit.name, unit.nbytes) for unit in run.about.units]
    finder, (begin_s, end_s, count) = HtmlReportUnits(run.about), _window(run.events)
    for event in run.events:
        unit = finder.find(event.name)
        if unit is not None and begin_s <= event.begin_s < end_s and event.row != STEP:
            costs[unit].add(kind_of(event), event, 1 / count)
    return costs


def _window(events: Sequence[Event]) -> tuple[float, float, int]:
    """Return begin, end and number of the whole iterations. Without one, all events count as one
    iteration.
    """
    whole = whole_iterations(events)
    if whole:
        return whole[0][0], whole[-1][1], len(whole)
    return float("-inf"), float("inf"), 1
