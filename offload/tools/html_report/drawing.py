"""The data that the page's script draws, as plain lists: times in microseconds, names by number."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from offload.core.strict_json import printable
from offload.core.timeline import STEP, Event
from offload.telemetry.run_file import Run
from offload.tools.html_report.by_unit import HtmlReportUnits, kind_of, typical_iteration
from offload.tools.html_report.memory import MemoryBands

KINDS = (
    "forward",
    "backward",
    "evaluation",
    "update",
    "waiting",
    "to-device",
    "to-host",
    "read",
    "write",
)
# Rows from top to bottom: their labels, and the kinds in them.
ROWS = (
    ("compute", ("forward", "backward", "evaluation")),
    ("update", ("update",)),
    ("waiting", ("waiting",)),
    ("to device", ("to-device",)),
    ("to host", ("to-host",)),
    ("disk reads", ("read",)),
    ("disk writes", ("write",)),
)


def draw(run: Run, tiers: Sequence[MemoryBands]) -> dict[str, Any]:
    """Build the data for `page.js`. An event is kind, lane, name, unit (-1: none), begin, duration
    and bytes.
    """
    drawn = sorted((e for e in run.events if e.row != STEP), key=lambda event: event.begin_s)
    names: dict[str, int] = {}
    finder = HtmlReportUnits(run.about)
    lanes = _lanes(drawn)
    rows = []
    for event, lane in zip(drawn, lanes, strict=True):
        unit = finder.find(event.name)
        rows.append(
            [
                KINDS.index(kind_of(event)),
                lane,
                names.setdefault(printable(event.name), len(names)),
                -1 if unit is None else unit,
                _micros(event.begin_s),
                _micros(event.end_s - event.begin_s),
                event.nbytes,
            ]
        )
    steps = sorted((e for e in run.events if e.row == STEP), key=lambda event: event.begin_s)
    return {
        "kinds": KINDS,
        "rows": ROWS,
        "names": [*names],
        "units": [printable(unit.name) for unit in run.about.units],
        "events": rows,
        "steps": [[printable(e.name), _micros(e.begin_s), _micros(e.end_s)] for e in steps],
        "first": _first_view(run.events),
        "memory": [_memory(tier) for tier in tiers],
    }


def _memory(tier: MemoryBands) -> dict[str, Any]:
    return {
        "tier": printable(tier.name),
        "budget": tier.budget_bytes,
        "times": [_micros(at_s) for at_s in tier.times_s],
        "bands": [{"label": printable(b.label), "bytes": b.nbytes} for b in tier.bands],
    }


def _first_view(events: Sequence[Event]) -> list[float]:
    """Return begin and end of the first view: a typical iteration, or else all events."""
    typical = typical_iteration(events)
    if typical:
        return [_micros(typical[0]), _micros(typical[1])]
    begin_s = min((e.begin_s for e in events), default=0.0)
    return [_micros(begin_s), _micros(max((e.end_s for e in events), default=1.0))]


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
