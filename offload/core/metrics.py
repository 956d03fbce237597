"""The metrics of one engine: counters, seconds by cause, events, and every fall-back by name.

The parts of the engine record here while they run; `Report` reads a snapshot. Any thread may call
it, and it is cheap enough for every transfer and every chunk. Prints nothing and decides nothing.

Within a step each moment of the step's thread counts for one cause, that of the innermost span, or
for `OTHER`: so the seconds of a step add up to its wall time. When torch's profiler runs, each span
is a range in its trace.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.autograd import profiler

from offload.core.errors import StateError
from offload.core.log import LOG
from offload.core.timeline import (
    COMPUTING,
    OTHER,
    STEP,
    UPDATE,
    WAITING,
    Event,
    EventLog,
    NumberLog,
)

MOST_EVENTS = 8192  # the last ones are kept; 40 bytes each, and their names
MOST_SAMPLES = 4096  # of memory; the last ones are kept
_AT_S = "at_s"  # the column of the time in a row of samples, beside the names of the gauges
_SAMPLE_EVERY_S = 0.02  # a sample costs the training thread up to 0.1 ms
_SHORT_WAIT_S = 50e-6  # shorter waits outside of steps are counted but recorded as no event


@dataclass(frozen=True)
class MetricsSnapshot:
    """A snapshot of the numbers. `later - earlier` has the differences, and all fall-backs."""

    counts: Mapping[str, int]
    seconds: Mapping[str, float]  # within steps, by cause
    outside: Mapping[str, float]  # of spans outside of a step, or in another thread than its own
    fallbacks: Mapping[str, str]  # the degraded feature -> the reason

    def __sub__(self, earlier: MetricsSnapshot) -> MetricsSnapshot:
        return MetricsSnapshot(
            {name: n - earlier.counts.get(name, 0) for name, n in self.counts.items()},
            {name: s - earlier.seconds.get(name, 0.0) for name, s in self.seconds.items()},
            {name: s - earlier.outside.get(name, 0.0) for name, s in self.outside.items()},
            self.fallbacks,
        )


class Sample(NamedTuple):
    """A sample of all gauges, in bytes, at one moment of `time.perf_counter`."""

    at_s: float
    nbytes: Mapping[str, int]

    @classmethod
    def of_row(cls, row: dict[str, float]) -> Sample:
        return cls(row.pop(_AT_S), {name: int(nbytes) for name, nbytes in row.items()})


NOTHING = MetricsSnapshot({}, {}, {}, {})


@dataclass
class Metrics:
    """A set of numbers; each engine has its own. strict: a fall-back raises `StateError` instead of
    being recorded.
    """

    strict: bool = False
    _counts: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=dict)
    _outside: dict[str, float] = field(default_factory=dict)
    _fallbacks: dict[str, str] = field(default_factory=dict)
    _events: EventLog = field(default_factory=lambda: EventLog(MOST_EVENTS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Gauges of memory: name -> function that returns its bytes; and the samples of all of them.
    _gauges: dict[str, Callable[[], int | None]] = field(default_factory=dict)
    _samples: NumberLog[Sample] = field(
        default_factory=lambda: NumberLog(MOST_SAMPLES, Sample.of_row)
    )
    _sampled_s: float = 0.0
    # The current step: its thread, its open spans, and since when the innermost one is charged.
    _stepping: int | None = None
    _within: list[tuple[str, str]] = field(default_factory=list)
    _since_s: float = 0.0

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter; names carry their unit: `disk_read_bytes`, `prefetch_hits`."""
        with self._lock:
            self._counts[name] += amount

    @contextmanager
    def step(self, name: str = STEP) -> Iterator[None]:
        """Record the block as one step of this thread; one at a time. The open spans that an
        interrupted step has left are dropped.
        """
        begin_s = self._since_s = time.perf_counter()
        self._within = [(OTHER, "")]
        self._stepping = threading.get_ident()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self._charge(end_s)
            self._stepping = None
            self.event(Event(STEP, name, begin_s, end_s))

    def span(self, cause: str, what: str = "") -> _CauseSpan:
        """Charge the time of the `with` block to `cause`, less that of spans inside it.

        Charges it also when the block ends with an exception. what: follows the cause in the name
        of the event in the trace.
        """
        return _CauseSpan(self, cause, what)

    def _charge(self, now_s: float) -> None:
        """Charge the time since the last change of cause to the innermost span."""
        cause, what = self._within[-1]
        with self._lock:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + now_s - self._since_s
            if cause != OTHER:
                row = UPDATE if cause in COMPUTING else WAITING
                name = f"{cause}: {what}" if what else cause
                self._events.append(Event(row, name, self._since_s, now_s))
        self._since_s = now_s

    def event(self, event: Event) -> None:
        """Append an event to the trace; it overwrites the oldest when the log is full."""
        with self._lock:
            self._events.append(event)

    def events(self) -> Sequence[Event]:
        """Return the recorded events in the order in which they ended. If they are `MOST_EVENTS`,
        earlier ones may have been overwritten.
        """
        with self._lock:
            return self._events.copy()

    def events_since(self, begin_s: float) -> list[Event]:
        """Return the events that ended at `begin_s` or later, the latest first."""
        with self._lock:
            return self._events.since(begin_s)

    def watch(self, name: str, ask: Callable[[], int | None]) -> None:
        """Sample the gauge `ask` while the engine runs. ask: returns the bytes in use now, or None
        when its object is gone, which removes the gauge; called in the thread that trains.
        """
        self._gauges[name] = ask

    def sample(self, now_s: float) -> None:
        """Sample all gauges, unless the last sample is less than 20 ms old."""
        if now_s - self._sampled_s < _SAMPLE_EVERY_S or not self._gauges:
            return
        self._sampled_s = now_s
        known = {name: ask() for name, ask in list(self._gauges.items())}
        self._gauges = {n: ask for n, ask in self._gauges.items() if known.get(n, 0) is not None}
        found = {name: nbytes for name, nbytes in known.items() if nbytes is not None}
        with self._lock:
            self._samples.append({_AT_S: now_s, **found})

    def samples(self) -> Sequence[Sample]:
        """Return the recorded samples, the oldest first."""
        with self._lock:
            return self._samples.copy()

    def fall_back(self, what: str, why: str) -> None:
        """Record that `what` is degraded, and why. The first reason stays. Raises `StateError` if
        `strict` is set.
        """
        if self.strict:
            raise StateError(
                f"{what}: {why} (strict=True allows no fall-back; mend it, or set strict=False)"
            )
        self.note(what, why)

    def note(self, what: str, why: str) -> None:
        """Record a degradation for the report, also if `strict` is set, and log it once. The first
        reason stays.
        """
        with self._lock:
            is_new = what not in self._fallbacks
            self._fallbacks.setdefault(what, why)
        if is_new:
            LOG.warning("fall-back: %s: %s", what, why)

    def snapshot(self) -> MetricsSnapshot:
        with self._lock:
            return MetricsSnapshot(
                dict(self._counts), dict(self._seconds), dict(self._outside), dict(self._fallbacks)
            )


@dataclass(slots=True, eq=False)
class _CauseSpan:
    """A context manager that charges its time to one cause. A generator costs twice as much."""

    metrics: Metrics
    cause: str
    what: str
    begin_s: float = 0.0
    range: profiler.record_function | None = None  # in the trace of torch's profiler

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self.range = profiler.record_function(f"offload: {self.cause}")
            self.range.__enter__()  # type: ignore[no-untyped-call]
        metrics = self.metrics
        self.begin_s = time.perf_counter()
        if metrics._stepping == threading.get_ident():
            metrics._charge(self.begin_s)
            metrics._within.append((self.cause, self.what))

    def __exit__(self, *exception: object) -> None:
        metrics, end_s = self.metrics, time.perf_counter()
        if metrics._stepping == threading.get_ident():
            metrics._charge(end_s)
            metrics._within.pop()
            metrics.sample(end_s)
        else:
            name = f"{self.cause}: {self.what}" if self.what else self.cause
            with metrics._lock:
                spent_s = metrics._outside.get(self.cause, 0.0) + end_s - self.begin_s
                metrics._outside[self.cause] = spent_s
                if end_s - self.begin_s >= _SHORT_WAIT_S:
                    metrics._events.append(Event(WAITING, name, self.begin_s, end_s))
        if self.range is not None:
            self.range.__exit__(None, None, None)
