"""Events of a run, and pure functions that count them and convert them to a trace to view.

An event is one operation of one resource. Operations of a resource may overlap: several reads are
in flight at a time. `in_turn` cuts the events so that none overlap, and their sum is the time in
which the resource was busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

STEP = "step"
COMPUTE = "compute"  # the thread that runs the model computes, between uses of units
UPDATE = "update"  # the thread that runs the optimizer step computes
WAITING = "waiting"  # that thread waits
DISK_READS = "disk reads"
DISK_WRITES = "disk writes"
TO_DEVICE = "copies to the device"
TO_HOST = "copies to the host"
ROWS = (STEP, COMPUTE, UPDATE, WAITING, DISK_READS, DISK_WRITES, TO_DEVICE, TO_HOST)


class Event(NamedTuple):
    """An event: one operation of a resource. Its times are those of `time.perf_counter`."""

    row: str
    name: str
    begin_s: float
    end_s: float
    nbytes: int = 0


def in_turn(events: Iterable[Event]) -> list[Event]:
    """Cut the events so that none overlap: each moment belongs to the event that ended first."""
    covered: list[Event] = []  # in order of time
    for event in sorted(events, key=lambda event: event.end_s):
        end_s, at = event.end_s, len(covered)
        while end_s > event.begin_s:
            before = covered[at - 1] if at else None
            begin_s = event.begin_s if before is None else max(event.begin_s, before.end_s)
            if begin_s < end_s:
                covered.insert(at, event._replace(begin_s=begin_s, end_s=end_s))
            if before is None:
                break
            end_s, at = min(end_s, before.begin_s), at - 1
    return covered


def busy_s(events: Iterable[Event]) -> float:
    """Count the seconds in which at least one event was in flight: the sum of `in_turn`."""
    total_s, reached_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.begin_s):
        if event.end_s > reached_s:
            total_s += event.end_s - max(event.begin_s, reached_s)
            reached_s = event.end_s
    return total_s


def whole_steps(events: Sequence[Event], some_are_lost: bool) -> list[Event]:
    """Return the events from the first step on whose events are complete. events: in the order in
    which they ended; some_are_lost: there were earlier ones, which were overwritten.
    """
    known_s = events[0].end_s if events and some_are_lost else float("-inf")
    begins_s = [e.begin_s for e in events if e.row == STEP and e.begin_s >= known_s]
    first_s = min(begins_s, default=known_s)
    return [event for event in events if event.begin_s >= first_s]


def to_chrome(events: Sequence[Event]) -> dict[str, Any]:
    """Convert events to the trace format of chrome://tracing and Perfetto: one row for each
    resource, times in microseconds.
    """
    start_s = min((event.begin_s for event in events), default=0.0)
    about: list[dict[str, Any]] = [_name("process_name", 0, "offload")]
    drawn: list[dict[str, Any]] = []
    for number, row in enumerate(ROWS, start=1):
        here = in_turn(event for event in events if event.row == row)
        if here:
            about.append(_name("thread_name", number, row))
            about.append(_about("thread_sort_index", number, sort_index=number))
        drawn += [_draw(event, number, start_s) for event in here]
    steps = sum(event.row == STEP for event in events)
    return {
        "traceEvents": about + drawn,
        "displayTimeUnit": "ms",
        "otherData": {"made_by": "offload", "steps": steps},
    }


def _draw(event: Event, row: int, start_s: float) -> dict[str, Any]:
    # Begin and end are rounded to nanoseconds, once each: so adjacent events do not overlap.
    begin_ns, end_ns = (round((t - start_s) * 1e9) for t in (event.begin_s, event.end_s))
    drawn = {
        "ph": "X",
        "pid": 1,
        "tid": row,
        "cat": event.row,
        "name": event.name,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
    }
    return {**drawn, "args": {"bytes": event.nbytes}} if event.nbytes else drawn


def _about(what: str, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": what, "args": args}


def _name(what: str, row: int, name: str) -> dict[str, Any]:
    return _about(what, row, name=name)
