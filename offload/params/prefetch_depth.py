"""The prediction of the next uses of blocks, and the prefetch depth, which is derived from the
speeds of the drive and of the model while it runs.

The metrics have the times of parameter reads, the trace has the times of unit uses. The depth
follows from both and is derived anew after every round over the units, so that it adapts to a drive
that slows down or a batch that gets longer. The time between two uses, less the waits in it, is
also recorded in the timeline as the unit's compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile

from offload.core.metrics import Metrics
from offload.core.timeline import COMPUTE, DISK_READS, Event, busy_s
from offload.params.prefetch import HORIZON, derive_depth, next_uses
from offload.params.trace import Phase, Trace, Use
from offload.planning.unit import Unit

_WEIGHT = 0.5  # of the latest rate in the moving average


class PrefetchDepth:
    """The prefetch depth of one model, in units, and the uses that its trace predicts.

    sizes: bytes of its blocks. name: prefix of the names under which reads of blocks are recorded.
    depth: a fixed depth; None: derived. units: one for each block. now_s: the clock.
    """

    def __init__(
        self,
        metrics: Metrics,
        trace: Trace,
        sizes: Sequence[int],
        name: str,
        depth: int | None = None,
        units: Sequence[Unit] = (),
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self.trace = trace
        self.read_bytes_per_s: float | None = None  # None: no read has been measured yet
        self._metrics = metrics
        self._sizes = [size for size in sizes if size]
        self._name = name
        self._now_s = now_s or time.perf_counter
        self._since_s = self._now_s()
        self._last_use_s: float | None = None
        self._waited_s = 0.0  # since the latest use
        self._is_derived = depth is None
        self._units = units
        self._blocks = len(sizes)
        self._running: tuple[str, float] | None = None  # name and begin of the compute that runs
        self._recorded = 0  # uses since the depth was derived
        self._uses: dict[int, int] | None = None  # None: to be predicted
        self.depth = self.derive() if depth is None else depth

    def note_use(self, phase: Phase, unit: int) -> None:
        """Note that a unit is used now, and derive the depth after each round over the units."""
        now_s = self._now_s()
        self.pause(now_s)
        self._uses = None
        last_s, self._last_use_s = self._last_use_s, now_s
        pace_s = None if last_s is None else max(0.0, now_s - last_s - self._waited_s)
        self._waited_s = 0.0
        self.trace.record(phase, unit, pace_s)
        name = self._units[unit].name if self._units else ""
        self._running = f"{phase.value} {unit}: {name}", now_s
        self._metrics.sample(now_s)
        self._recorded += 1
        if self._is_derived and self._recorded >= self._blocks:
            self._recorded, before = 0, self.depth
            self.depth = self.derive()
            self._metrics.count("prefetch_depth_changes", int(self.depth != before))

    def uses(self) -> dict[int, int]:
        """Return how many uses ahead each block is needed, soonest first."""
        if self._uses is None:
            self._uses = next_uses(self._needed(self.trace.ahead()), self._blocks)
        return self._uses

    def uses_before_update(self) -> dict[int, int]:
        """Return the next uses, in a backward pass only those before its end."""
        if self.trace.last is None or self.trace.last.phase is not Phase.BACKWARD:
            return self.uses()
        return next_uses(self._needed(self._left_in_backward()), self._blocks)

    def left_in_backward(self) -> set[int]:
        """Return the numbers of the blocks that the trace expects to be used before the present
        backward pass ends.
        """
        most = HORIZON * self._blocks + HORIZON
        return set(self._needed(islice(self._left_in_backward(), most)))

    def _left_in_backward(self) -> Iterator[Use]:
        return takewhile(lambda use: use.phase is Phase.BACKWARD, self.trace.ahead())

    def _needed(self, uses: Iterable[Use]) -> Iterator[int]:
        return (number for use in uses for number in self._units[use.unit].needs)

    def pause(self, now_s: float | None = None) -> None:
        """Record the end of the compute that runs, if any."""
        if self._running is not None:
            name, begin_s = self._running
            end_s = self._now_s() if now_s is None else now_s
            self._running = None
            self._metrics.event(Event(COMPUTE, name, begin_s, end_s))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the time of the block from the compute that runs."""
        running, begin_s = self._running, self._now_s()
        self.pause(begin_s)
        try:
            yield
        finally:
            end_s = self._now_s()
            self._waited_s += end_s - begin_s
            self._running = running and (running[0], end_s)

    def derive(self) -> int:
        """Return the prefetch depth for the rates measured so far; take in the reads since the last
        call.
        """
        events = [
            event
            for event in self._metrics.events_since(self._since_s)
            if event.row == DISK_READS and event.name.startswith(self._name)
        ]
        self._since_s = self._now_s()
        busy = busy_s(events)
        if busy:
            rate = sum(event.nbytes for event in events) / busy
            before = self.read_bytes_per_s or rate
            self.read_bytes_per_s = before + _WEIGHT * (rate - before)
        if not self.read_bytes_per_s:
            return derive_depth([], [])
        rate = self.read_bytes_per_s
        return derive_depth((size / rate for size in self._sizes), self.trace.paces_s())
