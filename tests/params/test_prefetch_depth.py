"""The depth follows the speed of the disk and of the model."""

from __future__ import annotations

import time
from itertools import count
from types import SimpleNamespace

import pytest

from offload.core.metrics import Metrics
from offload.core.timeline import DISK_READS, DISK_WRITES, Event
from offload.params import prefetch as pace_module
from offload.params.prefetch import PrefetchDepth
from offload.params.trace import Phase, Trace

SIZES = [1000] * 6 + [0]


def read(metrics: Metrics, nbytes: int, seconds: float, name: str = "parameters 1: x") -> None:
    end_s = time.perf_counter()
    metrics.event(Event(DISK_READS, name, end_s - seconds, end_s, nbytes))


def run(trace: Trace, seconds: float) -> None:
    for unit in range(6):
        trace.record(Phase.FORWARD, unit, seconds)


def test_the_depth_is_the_ratio_of_reading_to_computing() -> None:
    metrics, trace = Metrics(), Trace("x", 7)
    prefetch = PrefetchDepth(metrics, trace, SIZES, "parameters ")
    assert prefetch.derive() == 2 and prefetch.read_bytes_per_s is None
    run(trace, 1.0)
    read(metrics, 1000, 0.5)
    metrics.event(Event(DISK_WRITES, "parameters 1: x", 0.0, time.perf_counter(), 9))
    read(metrics, 10**9, 0.5, "state chunk 1: x")
    assert prefetch.derive() == 2
    assert prefetch.read_bytes_per_s == pytest.approx(2000)
    for _ in range(40):  # a drive that has become slow; a model that has become fast
        read(metrics, 1000, 2.0)
        depth = prefetch.derive()
    assert prefetch.read_bytes_per_s == pytest.approx(500, rel=1e-3) and depth == 3
    for _ in range(40):
        run(trace, 0.001)
    assert prefetch.derive() == 8


def test_reads_that_overlap_count_once() -> None:
    metrics, trace = Metrics(), Trace("x", 7)
    prefetch = PrefetchDepth(metrics, trace, SIZES, "parameters ")
    for _ in range(4):
        read(metrics, 500, 1.0)
    prefetch.derive()
    assert prefetch.read_bytes_per_s == pytest.approx(2000, rel=0.05)


def test_waits_are_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()  # each reading is a second later
    monkeypatch.setattr(pace_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    trace = Trace("x", 7)
    prefetch = PrefetchDepth(Metrics(), trace, SIZES, "parameters ", depth=5)
    prefetch.note_use(Phase.FORWARD, 0)
    prefetch.note_use(Phase.FORWARD, 1)
    with pytest.raises(ValueError), prefetch.waiting():
        raise ValueError
    prefetch.note_use(Phase.FORWARD, 2)
    assert trace.paces_s() == [1.0, 3.0 - 1.0]  # of 0 and of 1
    assert prefetch.depth == 5 and prefetch.read_bytes_per_s is None


def test_the_depth_is_derived_after_each_round() -> None:
    metrics, trace = Metrics(), Trace("x", 7)
    prefetch = PrefetchDepth(metrics, trace, SIZES, "parameters ")
    assert prefetch.depth == 2
    read(metrics, 10, 10.0)
    for unit in range(6):
        prefetch.note_use(Phase.FORWARD, unit)
        assert prefetch.depth == 2
    prefetch.note_use(Phase.FORWARD, 6)
    assert prefetch.depth == 8 and metrics.snapshot().counts["prefetch_depth_changes"] == 1
