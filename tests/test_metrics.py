"""Metrics: nothing is lost between threads, a span counts on errors too, a fall-back is kept or
raised.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from offload.errors import StateError
from offload.metrics import Metrics


def test_counts_from_many_threads_add_up() -> None:
    metrics = Metrics()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: metrics.count("disk_read_bytes", i), range(1000)))
    metrics.count("prefetch_hits")
    assert dict(metrics.snapshot().counts) == {"disk_read_bytes": 499_500, "prefetch_hits": 1}


def test_a_span_counts_even_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr("offload.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    with metrics.span("disk_read"):
        pass
    with pytest.raises(KeyError), metrics.span("disk_read"):
        raise KeyError
    assert dict(metrics.snapshot().seconds) == {"disk_read": 2.75}


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


def test_the_first_reason_of_a_fall_back_stays() -> None:
    metrics = Metrics()
    metrics.fall_back("kernels", "no native core")
    metrics.fall_back("kernels", "something later")
    assert dict(metrics.snapshot().fallbacks) == {"kernels": "no native core"}


def test_strict_raises_instead() -> None:
    with pytest.raises(StateError, match=r"kernels: no native core .*strict"):
        Metrics(strict=True).fall_back("kernels", "no native core")
