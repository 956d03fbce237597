"""The costs of one optimizer's steps: those of the last step, and the best rates of all steps.

The rates are those of real transfers and updates, so they cost nothing to measure. The disk's rate
is bytes read and written over the seconds in which it was busy, in one step that did both; the
update's is bytes read and written in memory over the seconds of the update. A rate that this run
has never reached is not known here: `probe.py` measures it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from offload.core.metrics import NOTHING, Metrics, MetricsSnapshot
from offload.core.timeline import (
    DISK_READS,
    DISK_WRITES,
    IN_MODEL,
    IN_STEP,
    Event,
    NumberLog,
    StepFact,
    busy_s,
)
from offload.planning.state_plan import UNKNOWN, Speeds

MOST_STEPS = 4096  # that the log holds
_EARLY = "device_to_host_bytes", "gradients_early_bytes"  # counted since the step before
_OWN = "number", "begin_s", "end_s"  # of the step itself, in a row of the log
_SECONDS, _COUNTS = "s", "n"  # prefixes of all other names in a row


class StepStats:
    def __init__(self, metrics: Metrics, speeds: Speeds = UNKNOWN) -> None:
        self.metrics = metrics
        self.last: MetricsSnapshot = NOTHING  # the last step that succeeded
        self._ended: MetricsSnapshot = NOTHING  # the totals at the end of the last step
        self.speeds = speeds  # the best so far
        self.steps = StepLog()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that the block runs."""
        before = self.metrics.snapshot()
        number = before.counts.get("steps", 0) + 1
        begin_s = time.perf_counter()
        with self.metrics.step(f"step {number}"):
            yield
        now = self.metrics.snapshot()
        own, whole = now - before, now - self._ended  # whole: the passes before the step, too
        early = {name: whole.counts[name] for name in _EARLY if name in whole.counts}
        self.last = replace(own, counts={**own.counts, **early})
        self._ended = now
        seconds = {f"{IN_STEP}{cause}": s for cause, s in own.seconds.items()}
        seconds |= {f"{IN_MODEL}{cause}": s for cause, s in whole.outside.items()}
        counts = dict(whole.counts)
        self.steps.append(StepFact(number, begin_s, time.perf_counter(), seconds, counts))
        self.speeds = best_speeds(self.last, self.metrics.events_since(begin_s), self.speeds)


def best_speeds(step: MetricsSnapshot, events: list[Event], before: Speeds = UNKNOWN) -> Speeds:
    """Compute the rates of one step from its events; return the higher of each and the one before.
    A rate that is not known does not count.
    """
    read, written, updated = (
        step.counts.get(f"{name}_bytes", 0) for name in ("disk_read", "disk_written", "updated")
    )
    update_s = step.seconds.get("update", 0.0)
    disk, update = before.disk_bytes_per_s or 0.0, before.update_bytes_per_s or 0.0
    if read and written:
        rows = DISK_READS, DISK_WRITES
        disk_s = busy_s(event for event in events if event.row in rows)
        disk = max(disk, (read + written) / disk_s if disk_s else 0.0)
    if updated and update_s:
        update = max(update, updated / update_s)
    return Speeds(disk or None, update or None)


class StepLog:
    """A log of the last steps, in memory of fixed size, since a long run keeps thousands of them.
    It stores no zero seconds and no zero counts. Any thread may use it.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._rows = NumberLog(most, _fact)
        self._lock = threading.Lock()

    def append(self, step: StepFact) -> None:
        row = dict(zip(_OWN, (step.number, step.begin_s, step.end_s), strict=True))
        row |= {_SECONDS + cause: s for cause, s in step.seconds.items() if s}
        row |= {_COUNTS + name: count for name, count in step.counts.items() if count}
        with self._lock:
            self._rows.append(row)

    @property
    def last(self) -> StepFact:
        with self._lock:
            return self._rows[-1]

    def __len__(self) -> int:
        return len(self._rows)

    def so_far(self) -> Sequence[StepFact]:
        """Return the steps that the log holds now, the oldest first."""
        with self._lock:  # another thread may end a step meanwhile
            return self._rows.copy()


def _fact(row: dict[str, float]) -> StepFact:
    number, begin_s, end_s = (row.pop(name) for name in _OWN)
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value in row.items():
        if name[0] == _SECONDS:
            seconds[name[1:]] = value
        else:
            counts[name[1:]] = int(value)
    return StepFact(int(number), begin_s, end_s, seconds, counts)
