"""The prefetch depth, derived from the speeds of the drive and of the model while it runs.

The metrics have the times of parameter reads, the trace has the times of unit uses. The depth
follows from both and is derived anew after every round over the units, so that it adapts to a drive
that slows down or a batch that gets longer. The time between two uses, less the waits in it, is
also recorded in the timeline as the unit's compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from offload.core.metrics import Metrics
from offload.core.timeline import COMPUTE, DISK_READS, Event, busy_s
from offload.params.prefetch import derive_depth
from offload.params.trace import Phase, Trace

_WEIGHT = 0.5  # of the latest rate in the moving average


class PrefetchDepth:
    """The prefetch depth of one model, in units.

    sizes: bytes of its blocks. name: prefix of the names under which reads of blocks are recorded.
    depth: a fixed depth; None: derived.
    """

    def __init__(
        self,
        metrics: Metrics,
        trace: Trace,
        sizes: Sequence[int],
        name: str,
        depth: int | None = None,
        unit_names: Sequence[str] = (),
    ) -> None:
        self.read_bytes_per_s: float | None = None  # None: no read has been measured yet
        self._metrics = metrics
        self._trace = trace
        self._sizes = [size for size in sizes if size]
        self._name = name
        self._since_s = time.perf_counter()
        self._last_use_s: float | None = None
        self._waited_s = 0.0  # since the latest use
        self._is_derived = depth is None
        self._units = len(sizes)
        self._unit_names = unit_names
        self._running: tuple[str, float] | None = None  # name and begin of the compute that runs
        self._uses = 0  # since the depth was derived
        self.depth = self.derive() if depth is None else depth

    def note_use(self, phase: Phase, unit: int) -> None:
        """Note that a unit is used now, and derive the depth after each round over the units."""
        now_s = time.perf_counter()
        self.pause(now_s)
        self._trace.record(phase, unit, self._take_time(now_s))
        name = self._unit_names[unit] if self._unit_names else ""
        self._running = f"{phase.value} {unit}: {name}", now_s
        self._metrics.sample(now_s)
        self._uses += 1
        if self._is_derived and self._uses >= self._units:
            self._uses, before = 0, self.depth
            self.depth = self.derive()
            self._metrics.count("prefetch_depth_changes", int(self.depth != before))

    def pause(self, now_s: float | None = None) -> None:
        """Record the end of the compute that runs, if any."""
        if self._running is not None:
            name, begin_s = self._running
            end_s = time.perf_counter() if now_s is None else now_s
            self._running = None
            self._metrics.event(Event(COMPUTE, name, begin_s, end_s))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the time of the block from the compute that runs."""
        running, begin_s = self._running, time.perf_counter()
        self.pause(begin_s)
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self._waited_s += end_s - begin_s
            self._running = running and (running[0], end_s)

    def _take_time(self, now_s: float) -> float | None:
        """Return the seconds since the latest use, without waits; None: there was no use before.
        Starts the next interval.
        """
        last_s, waited_s = self._last_use_s, self._waited_s
        self._last_use_s, self._waited_s = now_s, 0.0
        return None if last_s is None else max(0.0, now_s - last_s - waited_s)

    def derive(self) -> int:
        """Return the prefetch depth for the rates measured so far."""
        self._look()
        if not self.read_bytes_per_s:
            return derive_depth([], [])
        rate = self.read_bytes_per_s
        return derive_depth((size / rate for size in self._sizes), self._trace.paces_s())

    def _look(self) -> None:
        """Take in the reads since the last call."""
        events = [
            event
            for event in self._metrics.events_since(self._since_s)
            if event.row == DISK_READS and event.name.startswith(self._name)
        ]
        self._since_s = time.perf_counter()
        busy = busy_s(events)
        if not busy:
            return
        rate = sum(event.nbytes for event in events) / busy
        before = self.read_bytes_per_s or rate
        self.read_bytes_per_s = before + _WEIGHT * (rate - before)
