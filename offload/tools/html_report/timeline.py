"""The timeline of a run as data: the kind and the unit of each event, the cost of each unit in an
iteration, and the memory of each tier; for the page's script, and for Perfetto. Pure functions.

The timeline names acts, not units: `forward 3: blocks.2`, `parameter read: blocks.2`,
`state chunk 7: group 0 param 4 (64, 64)[0:512] and 2 more`. A chunk belongs to the unit of its
first parameter.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, Final

from offload.core.strict_json import printable
from offload.core.timeline import (
    COMPUTE,
    DISK_READS,
    DISK_WRITES,
    IN_STEP,
    STEP,
    TO_DEVICE,
    TO_HOST,
    UPDATE,
    WAITING,
    Event,
    to_chrome,
)
from offload.telemetry.iterations import is_wait
from offload.telemetry.run_file import About, Run

# Rows from top to bottom: their labels, and the kinds in them.
ROWS: Final = (
    ("compute", ("forward", "backward", "evaluation")),
    ("update", ("update",)),
    ("waiting", ("waiting",)),
    ("to device", ("to-device",)),
    ("to host", ("to-host",)),
    ("disk reads", ("read",)),
    ("disk writes", ("write",)),
)
KINDS: Final = tuple(kind for _, kinds in ROWS for kind in kinds)  # they set the colour
_KIND_OF: Final = {
    STEP: "step",
    UPDATE: "update",
    WAITING: "waiting",
    DISK_READS: "read",
    DISK_WRITES: "write",
    TO_DEVICE: "to-device",
    TO_HOST: "to-host",
}
_TIERS: Final = ("device", "host", "disk", "process")  # the fastest first
_MORE: Final = re.compile(r" and \d+ more$")
_SLICE: Final = re.compile(r"\[\d+:\d+\]$")


class HtmlReportUnits:
    """A lookup of unit numbers by the names of events; None: the event belongs to no unit."""

    def __init__(self, about: About) -> None:
        self._units = [unit.name for unit in about.units]
        self._by_name = {name: number for number, name in reversed([*enumerate(self._units)])}
        self._by_param = {param.name: param.unit for param in about.params}
        self.find = cache(self._look)

    def _look(self, name: str) -> int | None:
        head, _, what = name.partition(": ")
        number = head.rpartition(" ")[2]
        # Longer digits are no unit's number, and slow to convert.
        if number.isdecimal() and len(number) < 10 and self._units[int(number) :][:1] == [what]:
            return int(number)
        what = what or name
        if what in self._by_name:
            return self._by_name[what]
        return self._by_param.get(_SLICE.sub("", _MORE.sub("", what)))


@dataclass
class UnitCost:
    """The cost of one unit in an iteration, by kind of event: seconds, bytes moved, and number of
    acts, summed event by event.
    """

    name: str
    nbytes: int
    seconds: Counter[str] = field(default_factory=Counter)  # of floats, as the others
    moved: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event, share: float) -> None:
        """Add an event. share: one over the number of iterations."""
        kind = kind_of(event)
        self.seconds[kind] += (event.end_s - event.begin_s) * share  # type: ignore[assignment]
        self.moved[kind] += event.nbytes * share  # type: ignore[assignment]
        self.acts[kind] += share  # type: ignore[assignment]


def kind_of(event: Event) -> str:
    """Return the kind of an event: compute by phase, all else by row."""
    if event.row == COMPUTE:
        phase = event.name.partition(" ")[0]
        return phase if phase in ("forward", "backward") else "evaluation"
    return _KIND_OF[event.row]


def kind_of_part(part: str) -> str:
    """Return the kind of a part of an iteration, named as in `StepFact`."""
    if is_wait(part):
        return "waiting"
    return "update" if part.startswith(IN_STEP) else "forward"


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


def first_view(events: Sequence[Event]) -> tuple[float, float]:
    """Return begin and end of what is shown first: a typical iteration, or else all events."""
    begin_s = min((event.begin_s for event in events), default=0.0)
    whole_s = begin_s, max((event.end_s for event in events), default=begin_s + 1.0)
    return typical_iteration(events) or whole_s


def costs_of(run: Run) -> list[UnitCost]:
    """Return each unit's cost, means over the iterations of the timeline; empty without units."""
    costs = [UnitCost(unit.name, unit.nbytes) for unit in run.about.units]
    finder = HtmlReportUnits(run.about)
    # Without a whole iteration, all events count as one.
    whole = whole_iterations(run.events) or [(-inf, inf)]
    begin_s, end_s = whole[0][0], whole[-1][1]
    for event in run.events:
        unit = finder.find(event.name)
        if unit is not None and begin_s <= event.begin_s < end_s and event.row != STEP:
            costs[unit].add(event, 1 / len(whole))
    return costs


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """A kind of memory in a tier: its bytes at each of the tier's times."""

    label: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryBands:
    """The memory of one tier over time, as bands stacked on each other.

    budget_bytes: the tier's budget; None: none is known.
    """

    name: str
    times_s: tuple[float, ...]
    bands: tuple[Band, ...]
    budget_bytes: int | None

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(band.nbytes for band in self.bands), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=0)


def tiers_of(run: Run) -> tuple[MemoryBands, ...]:
    """Return the tiers, the fastest first; empty where no memory was sampled."""
    samples = sorted(run.samples, key=lambda sample: sample[0])
    if not samples:
        return ()
    times_s = tuple(at_s for at_s, _ in samples)
    bands: dict[str, list[Band]] = {}
    for number, kind in enumerate(run.memory):
        tier, _, what = kind.partition(": ")
        values = tuple(nbytes[number] for _, nbytes in samples)
        bands.setdefault(tier, []).append(Band(what or tier, values))
    # On a CPU torch itself allocates gradients, within the share that the plan sets aside, so no
    # sampled pool holds them.
    set_aside = run.about.shares.get("gradients", 0)
    if "host" in bands and set_aside and run.about.device == "cpu":
        bands["host"].insert(0, Band("gradients (set aside)", (set_aside,) * len(samples)))
    budgets = {"host": run.about.host_bytes, "device": run.about.device_bytes}
    known = [name for name in _TIERS if name in bands]
    return tuple(
        MemoryBands(name, times_s, tuple(bands[name]), budgets.get(name))
        for name in dict.fromkeys([*known, *bands])
    )


# --- for the script ------------------------------------------------------------------------------


def draw(run: Run, tiers: Sequence[MemoryBands]) -> dict[str, Any]:
    """Build the data for `page.js`. An event is kind, lane, name, unit (-1: none), begin, duration
    and bytes.
    """
    drawn = sorted((e for e in run.events if e.row != STEP), key=lambda event: event.begin_s)
    names: dict[str, int] = {}
    finder = HtmlReportUnits(run.about)
    rows = [
        [
            KINDS.index(kind_of(event)),
            lane,
            names.setdefault(printable(event.name), len(names)),
            -1 if (unit := finder.find(event.name)) is None else unit,
            _micros(event.begin_s),
            _micros(event.end_s - event.begin_s),
            event.nbytes,
        ]
        for event, lane in zip(drawn, _lanes(drawn), strict=True)
    ]
    steps = sorted((e for e in run.events if e.row == STEP), key=lambda event: event.begin_s)
    return {
        "kinds": KINDS,
        "rows": ROWS,
        "names": [*names],
        "units": [printable(unit.name) for unit in run.about.units],
        "events": rows,
        "steps": [[printable(e.name), _micros(e.begin_s), _micros(e.end_s)] for e in steps],
        "first": [*map(_micros, first_view(run.events))],
        "memory": [_memory(tier) for tier in tiers],
    }


def _memory(tier: MemoryBands) -> dict[str, Any]:
    return {
        "tier": printable(tier.name),
        "budget": tier.budget_bytes,
        "times": [_micros(at_s) for at_s in tier.times_s],
        "bands": [{"label": printable(b.label), "bytes": b.nbytes} for b in tier.bands],
    }


def _lanes(events: Sequence[Event]) -> list[int]:
    """Give each event the lowest free lane of its row. events: sorted by begin."""
    row_of = {kind: row for row, kinds in ROWS for kind in kinds}
    free: dict[str, list[int]] = {row: [] for row, _ in ROWS}
    busy: dict[str, list[tuple[float, int]]] = {row: [] for row, _ in ROWS}
    found = []
    for event in events:
        row = row_of[kind_of(event)]
        while busy[row] and busy[row][0][0] <= event.begin_s:
            heapq.heappush(free[row], heapq.heappop(busy[row])[1])
        lane = heapq.heappop(free[row]) if free[row] else len(busy[row])
        heapq.heappush(busy[row], (event.end_s, lane))
        found.append(lane)
    return found


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


# --- for other viewers ----------------------------------------------------------------------------


def to_perfetto(runs: Sequence[Run], paths: Sequence[str]) -> dict[str, Any]:
    """Build a timeline only for chrome://tracing and ui.perfetto.dev: without the facts that a run
    file has beside the events, with memory as counters, and with two runs as two processes. Each
    run starts at its own 0. paths: the names of the runs.
    """
    events: list[dict[str, Any]] = []
    for pid, (run, path) in enumerate(zip(runs, paths, strict=True), start=1):
        for event in to_chrome(run.events)["traceEvents"]:
            if event["name"] == "process_name":
                event = {**event, "args": {"name": f"{run.about.title} ({path})"}}
            events.append({**event, "pid": pid})
        events += _counters(run, pid)
    about = {"made_by": "offload report"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _counters(run: Run, pid: int) -> list[dict[str, Any]]:
    """Build the memory counters. Times count from the first event, as in `to_chrome`."""
    start_s = min((event.begin_s for event in run.events), default=0.0)
    return [
        {
            "ph": "C",
            "pid": pid,
            "name": f"memory: {tier.name}",
            "ts": round((at_s - start_s) * 1e6, 3),
            "args": {band.label: band.nbytes[number] for band in tier.bands},
        }
        for tier in tiers_of(run)
        for number, at_s in enumerate(tier.times_s)
        if at_s >= start_s
    ]
