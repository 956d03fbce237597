"""Metrics: nothing is lost between threads, a span counts on errors too, a fall-back is kept or
raised.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from offload.core.errors import StateError
from offload.core.metrics import MOST_EVENTS, Metrics
from offload.core.timeline import STEP, UPDATE, WAITING, Event, EventLog, NumberLog


def test_counts_from_many_threads_add_up() -> None:
    metrics = Metrics()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: metrics.count("disk_read_bytes", i), range(1000)))
    metrics.count("prefetch_hits")
    assert dict(metrics.snapshot().counts) == {"disk_read_bytes": 499_500, "prefetch_hits": 1}


def test_a_span_counts_even_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr("offload.core.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    with metrics.span("disk read"):
        pass
    with pytest.raises(KeyError), metrics.span("disk read"):
        raise KeyError
    assert dict(metrics.snapshot().outside) == {"disk read": 2.75}
    assert not metrics.snapshot().seconds, "no step, no seconds of steps"


def test_each_moment_of_a_step_belongs_to_one_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost span counts the time, also when it raises; time in no span is `other`."""
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    monkeypatch.setattr("offload.core.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    with metrics.step("step 1"):
        with metrics.span("update", "w"), pytest.raises(KeyError), metrics.span("disk read"):
            raise KeyError
        with metrics.span("update"):
            pass
    snapshot = metrics.snapshot()
    assert dict(snapshot.seconds) == {
        "other": (1 - 0) + (15 - 10) + (28 - 21),
        "update": (3 - 1) + (10 - 6) + (21 - 15),
        "disk read": 6 - 3,
    }
    assert sum(snapshot.seconds.values()) == 28.0 and not snapshot.outside
    assert metrics.events() == [
        Event(UPDATE, "update: w", 1.0, 3.0),
        Event(WAITING, "disk read", 3.0, 6.0),
        Event(UPDATE, "update: w", 6.0, 10.0),
        Event(UPDATE, "update", 15.0, 21.0),
        Event(STEP, "step 1", 0.0, 28.0),
    ]


def test_spans_of_other_threads_are_not_the_steps() -> None:
    metrics = Metrics()
    begin_s = time.perf_counter()
    with metrics.step(), ThreadPoolExecutor(2) as pool, metrics.span("device copy"):
        pool.submit(in_a_span, metrics).result()
    elapsed_s = time.perf_counter() - begin_s
    snapshot = metrics.snapshot()
    assert set(snapshot.outside) == {"disk read"}
    assert set(snapshot.seconds) == {"other", "device copy"}
    assert 0 < sum(snapshot.seconds.values()) <= elapsed_s


def in_a_span(metrics: Metrics) -> None:
    with metrics.span("disk read"):
        pass


def test_events_are_bounded() -> None:
    metrics = Metrics()
    for number in range(MOST_EVENTS + 10):
        metrics.event(Event(STEP, f"step {number}", number, number + 1))
    kept = metrics.events()
    assert len(kept) == MOST_EVENTS and kept[0].name == "step 10"


def test_the_difference_of_two_snapshots_is_what_happened_between() -> None:
    metrics = Metrics()
    metrics.count("steps", 3)
    before = metrics.snapshot()
    metrics.count("steps")
    metrics.count("misses", 2)
    metrics.fall_back("io", "io_uring is forbidden here")
    difference = metrics.snapshot() - before
    assert dict(difference.counts) == {"steps": 1, "misses": 2}
    assert dict(difference.fallbacks) == {"io": "io_uring is forbidden here"}
    assert dict(before.counts) == {"steps": 3}, "a snapshot stays as it was"


def test_the_first_reason_of_a_fall_back_stays_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    with caplog.at_level("INFO", "offload"):
        metrics.fall_back("kernels", "no native core")
        metrics.fall_back("kernels", "something later")
    assert dict(metrics.snapshot().fallbacks) == {"kernels": "no native core"}
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "fall-back: kernels: no native core")
    ]


def test_strict_raises_instead() -> None:
    with pytest.raises(StateError, match=r"kernels: no native core .*strict"):
        Metrics(strict=True).fall_back("kernels", "no native core")


def test_memory_is_looked_at_every_20_ms_at_most() -> None:
    """The training thread does it."""
    metrics = Metrics()
    metrics.watch("host", lambda: 7)
    for at_s in (1.0, 1.006, 1.019, 1.021, 1.03, 1.05):
        metrics.sample(at_s)
    assert [sample.at_s for sample in metrics.samples()] == [1.0, 1.021, 1.05]


def test_the_last_rows_of_numbers_that_come_and_go() -> None:
    log = NumberLog(3, dict)
    assert list(log) == []
    rows: list[dict[str, float]] = [{"a": 1}, {"a": 0, "b": 2.5}, {"b": 2**53 - 1}, {}, {"c": -1}]
    for count, row in enumerate(rows, 1):
        log.append(row)
        kept = rows[max(0, count - 3) : count]
        assert list(log) == kept == [log[index] for index in range(len(log))]
        assert log[-1] == row and len(log) == len(kept)
    with pytest.raises(IndexError):
        log[3]


def test_the_log_of_events_has_the_last_ones_as_they_were() -> None:
    events = [Event(STEP, f"step {i}", i, i + 0.5, 7 * i) for i in range(10)]
    log = EventLog(4)
    assert list(log) == log.since(0.0) == [] and len(log) == 0
    for count, event in enumerate(events, start=1):
        log.append(event)
        kept = events[max(0, count - 4) : count]
        assert list(log) == kept == [log[index] for index in range(len(log))]
        assert len(log) == len(kept) and log[-1] == event
        for begin_s in range(11):
            assert log.since(begin_s) == [e for e in kept[::-1] if e.end_s >= begin_s]


def test_names_of_events_are_not_interned() -> None:
    """The table of interned texts has those of all modules: names that come and go once a step
    would make it grow by megabytes.
    """
    name, same = ("".join(["a name ", "of its own"]) for _ in range(2))
    EventLog(4).append(Event(STEP, name, 0.0, 1.0))
    assert name == same and sys.intern(same) is same, "an equal text was interned"


def test_a_full_log_of_events_takes_no_more_memory_than_an_empty_one() -> None:
    tracemalloc.start()
    metrics = Metrics()
    empty_bytes, _ = tracemalloc.get_traced_memory()
    for i in range(2 * MOST_EVENTS):
        metrics.event(Event(STEP, "step" * (1 + i % 3), i + 0.25, i + 0.75, 1 << 40))
    full_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert full_bytes - empty_bytes < 16 << 10, "a list of them would take a megabyte"
