"""The costs of one optimizer's steps: those of the last step, and the best rates of all steps.

The rates are those of real transfers and updates, so they cost nothing to measure. The disk's rate
is bytes read and written over the seconds in which it was busy, in one step that did both; the
update's is bytes read and written in memory over the seconds of the update. A rate that this run
has never reached is not known here: `probe.py` measures it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from offload.core.metrics import NOTHING, Metrics, MetricsSnapshot
from offload.core.step_fact import StepFact
from offload.core.timeline import DISK_READS, DISK_WRITES, Event, busy_s
from offload.optim.step_log import StepLog
from offload.planning.planner import UNKNOWN, Speeds

STEP, MODEL = "step(): ", "model: "  # of seconds in a step; since the last one
_EARLY = "device_to_host_bytes", "gradients_early_bytes"


class StepStats:
    def __init__(self, metrics: Metrics, speeds: Speeds = UNKNOWN) -> None:
        self.metrics = metrics
        self.last: MetricsSnapshot = NOTHING  # the last step that succeeded
        self.round: MetricsSnapshot = (
            NOTHING  # from the end of the step before to the end of the last one: a whole iteration
        )
        self.round_s: float | None = None  # its time; None: there was no step before
        self._ended: MetricsSnapshot = NOTHING  # the totals at the end of the last step
        self._ended_s: float | None = None
        self.speeds = speeds  # the best so far
        self.stepped: Counter[str] = Counter()  # moved in steps; passes move bytes, too
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
        self.last = replace(now - before, counts=self._counts(before, now))
        self.stepped.update((now - before).counts)
        self._note_round(now)
        waits = {f"{MODEL}{cause}": s for cause, s in self.round.outside.items()}
        seconds = {**{f"{STEP}{cause}": s for cause, s in self.last.seconds.items()}, **waits}
        end_s, counts = time.perf_counter(), dict(self.round.counts)
        self.steps.append(StepFact(number, begin_s, end_s, seconds, counts))
        self.speeds = self.speeds.best(speeds_of(self.last, self.metrics.last_events()))

    def _note_round(self, now: MetricsSnapshot) -> None:
        now_s = time.perf_counter()
        self.round = now - self._ended
        self.round_s = None if self._ended_s is None else now_s - self._ended_s
        self._ended, self._ended_s = now, now_s

    def _counts(self, before: MetricsSnapshot, now: MetricsSnapshot) -> Mapping[str, int]:
        """Return the counts of the step; those of early gradients since the step before it."""
        since_then = (now - self._ended).counts
        early = {name: since_then[name] for name in _EARLY if name in since_then}
        return {**(now - before).counts, **early}


def speeds_of(step: MetricsSnapshot, events: list[Event]) -> Speeds:
    """Compute the rates of one step from its events."""
    read, written, updated = (
        step.counts.get(f"{name}_bytes", 0) for name in ("disk_read", "disk_written", "updated")
    )
    update_s = step.seconds.get("update", 0.0)
    disk = None
    if read and written:
        rows = DISK_READS, DISK_WRITES
        disk_s = busy_s(event for event in events if event.row in rows)
        disk = (read + written) / disk_s if disk_s else None
    return Speeds(disk, updated / update_s if updated and update_s else None)
