"""Events and steps of a run: logs of the last ones, and pure functions that count events and make a
trace of them to view.

An event is one operation of one resource. Operations of a resource may overlap: several reads are
in flight at a time. `in_turn` cuts the events so that none overlap, and their sum is the time in
which the resource was busy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import starmap
from math import nan
from typing import Any, Final, NamedTuple, Self, TypeVar, overload

STEP = "step"
COMPUTE = "compute"  # the thread that runs the model computes, between uses of units
UPDATE = "update"  # the thread that runs the optimizer step computes
WAITING = "waiting"  # that thread waits
DISK_READS = "disk reads"
DISK_WRITES = "disk writes"
TO_DEVICE = "copies to the device"
TO_HOST = "copies to the host"
ROWS = (STEP, COMPUTE, UPDATE, WAITING, DISK_READS, DISK_WRITES, TO_DEVICE, TO_HOST)
# Where the seconds of a step were spent, before their cause: in `step()`, or since the step before.
IN_STEP: Final = "step(): "
IN_MODEL: Final = "model: "
OTHER: Final = "other"
COMPUTING: Final = frozenset(
    {"update", "gradient norm", "state in", "state out"}
)  # the other causes are waits
_MOST_TEXTS = 1024  # shared texts; those with the number of a step in them never recur
R = TypeVar("R")


class Event(NamedTuple):
    """An event: one operation of a resource. Its times are those of `time.perf_counter`."""

    row: str
    name: str
    begin_s: float
    end_s: float
    nbytes: int = 0


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


class RingLog(Sequence[R]):
    """A ring buffer of the last `most` items, in columns, of which an item is made when it is read.
    One thread at a time.

    So a copy, such as a report of a long run has, which few users read to the end, takes no more
    memory than one of a short run.
    """

    _make: Callable[..., R]  # an item of its values, in the order of the columns

    def __init__(self, most: int, columns: dict[str, Any]) -> None:
        self._most, self._columns = most, columns
        self._count = 0  # of items appended, overwritten ones included

    def __len__(self) -> int:
        return min(self._count, self._most)

    def __iter__(self) -> Iterator[R]:
        return self._items(0, len(self))

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        """Return one item, or several: 0 is the oldest that the log still holds, -1 the latest."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return next(self._items(index % len(self), 1))

    def __eq__(self, other: object) -> bool:
        """Compare item by item, as lists do."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Self:
        """Return a copy that later items do not change."""
        made = copy(self)
        made._columns = {name: column[:] for name, column in self._columns.items()}
        return made

    def _items(self, first: int, count: int) -> Iterator[R]:
        """Make `count` items from number `first` of those that the log still holds."""
        begin = (self._count - len(self) + first) % self._most
        end, over = begin + count, max(0, begin + count - self._most)
        columns = [column[begin:end] + column[:over] for column in self._columns.values()]
        return starmap(self._make, zip(*columns, strict=True))


class NumberLog(RingLog[R]):
    """A log of rows of named numbers, 8 bytes per row and name, as float64. decode: makes an item
    of a row.

    A column is allocated when its name is first seen. Whole numbers below 2**53 are kept exactly.
    """

    def __init__(self, most: int, decode: Callable[[dict[str, float]], R]) -> None:
        super().__init__(most, {})  # nan in a column: the row has no such number
        self._decode = decode

    def append(self, numbers: Mapping[str, float]) -> None:
        place = self._count % self._most
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [nan]) * self._most
        for name, column in self._columns.items():
            column[place] = numbers.get(name, nan)
        self._count += 1  # last: the next row overwrites one that was interrupted

    def _make(self, *row: float) -> R:
        found = zip(self._columns, row, strict=True)
        return self._decode({name: n for name, n in found if n == n})  # not nan


class EventLog(RingLog[Event]):
    """A log of events: columns that are allocated at the start, and texts that events with the same
    text share.
    """

    _make = Event

    def __init__(self, most: int) -> None:
        columns = {
            "row": [""] * most,
            "name": [""] * most,
            "begin_s": array("d", [0.0]) * most,
            "end_s": array("d", [0.0]) * most,
            "nbytes": array("q", [0]) * most,
        }
        super().__init__(most, columns)
        # Not `sys.intern`: its table, which all modules share, grows by megabytes from texts that
        # are made and freed all the time.
        self._texts: dict[str, str] = {}

    def append(self, event: Event) -> None:
        """Append an event; it overwrites the oldest when the log is full."""
        place, texts = self._count % self._most, self._texts
        if len(texts) >= _MOST_TEXTS:
            texts.clear()
        rows, names, begins_s, ends_s, nbytes = self._columns.values()
        rows[place] = texts.setdefault(event.row, event.row)
        names[place] = texts.setdefault(event.name, event.name)
        begins_s[place], ends_s[place], nbytes[place] = event[2:]
        self._count += 1  # last: the next event overwrites one that was interrupted

    def since(self, begin_s: float) -> list[Event]:
        """Return the events that ended at `begin_s` or later, the latest first, up to the first
        one that ended before.
        """
        ends_s, held, count = self._columns["end_s"], len(self), 0
        while count < held and ends_s[(self._count - count - 1) % self._most] >= begin_s:
            count += 1
        return list(self._items(held - count, count))[::-1]


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
