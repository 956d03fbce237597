"""How far ahead to fetch: from the speed of the disk and of the model, as they are while it runs.

Reads of parameters have left their times in the metrics, uses of units theirs in the trace. The
depth follows from both, and is derived anew after every round over the units, so that it goes with
a drive that slows down or a batch that gets longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from offload.metrics import Metrics
from offload.scheduler import derive_depth
from offload.timeline import DISK_READS, busy_s
from offload.trace import Trace

_WEIGHT = 0.5  # of the latest rate, against those before


class Pace:
    """Of one model. sizes: bytes of its blocks. name: how the reads of a block begin."""

    def __init__(self, metrics: Metrics, trace: Trace, sizes: Sequence[int], name: str) -> None:
        self.read_bytes_per_s: float | None = None  # None: nothing was read yet
        self._metrics = metrics
        self._trace = trace
        self._sizes = [size for size in sizes if size]
        self._name = name
        self._since_s = time.perf_counter()

    def derive(self) -> int:
        """Units to fetch ahead."""
        self._look()
        if not self.read_bytes_per_s:
            return derive_depth([], [])
        rate = self.read_bytes_per_s
        return derive_depth((size / rate for size in self._sizes), self._trace.paces_s())

    def _look(self) -> None:
        """Take in what was read since the last look."""
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
