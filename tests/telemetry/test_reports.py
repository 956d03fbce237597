"""The report: what it says adds up, its trace agrees with it, and nothing is printed."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import os
import stat
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import CapacityError, ConfigError, StoreError
from offload.core.budget import Budget
from offload.core.config import format_size
from offload.core.heap import HEAP
from offload.core.host_facts import Memory
from offload.core.metrics import MOST_EVENTS, Metrics
from offload.core.timeline import (
    DISK_READS,
    DISK_WRITES,
    STEP,
    UPDATE,
    WAITING,
    Event,
    StepFact,
    busy_s,
    in_turn,
    to_chrome,
    whole_steps,
)
from offload.optim.step_stats import StepLog, best_speeds
from offload.planning import planner
from offload.planning.limits import host_bytes
from offload.planning.state_plan import Speeds
from offload.storage.engine import Fault, FaultKind
from offload.telemetry.parts import CAUSES

NUMEL = 64 * 300 + 300


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 4096)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 1024)
    monkeypatch.setattr(planner, "BUFFERS", 6)  # room is left for state


@pytest.fixture
def wrapped(tmp_path: Path, own_budget: Budget, small_chunks: None) -> Iterator[Any]:
    """Wrap an AdamW on a small layer, with gradients and with most of its state on disk."""
    made = optimizer()
    yield offload.wrap(made, host_memory=70_000, nvme=tmp_path)
    if isinstance(made, offload.optim.OffloadOptimizer):
        made.close()


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    layer = nn.Linear(64, 300)
    for param in layer.parameters():
        param.grad = torch.randn_like(param)
    return kind(layer.parameters(), lr=1e-3)


def steps(optimizer: Any, count: int) -> offload.Report:
    for _ in range(count):
        optimizer.step()
    return offload.report(optimizer)


# --- bytes and seconds ----------------------------------------------------------------------------


def test_bytes_are_those_of_the_plan(wrapped: Any) -> None:
    told = steps(wrapped, 3)
    moving = told.plan.step_written_bytes
    assert told.plan.resident_bytes and 0 < moving < told.plan.disk_bytes
    assert told.last.moved == {
        "disk_read_bytes": moving,
        "disk_written_bytes": moving,
        "spilled_bytes": 0,
        "spilled_read_bytes": 0,
        "device_to_host_bytes": 0,
        "host_to_device_bytes": 0,
        "updated_bytes": 28 * NUMEL,
    }
    assert told.disk_read_bytes == 2 * moving, "the first step finds nothing to read"
    assert told.disk_written_bytes == 3 * moving
    assert told.total.moved["updated_bytes"] == 3 * 28 * NUMEL
    assert told.plan.step_updated_bytes == 28 * NUMEL


def test_totals_go_on_when_the_plan_is_made_anew(wrapped: Any) -> None:
    before = steps(wrapped, 2)
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    after = steps(wrapped, 1)
    assert after.steps == 3
    assert after.disk_written_bytes > before.disk_written_bytes
    assert after.total.step_s > before.total.step_s
    assert after.outside["state out"] > 0 and after.outside["state in"] > 0


def test_seconds_add_up_to_the_time_in_step(wrapped: Any) -> None:
    told = steps(wrapped, 4)
    spans = [event for event in told.events if event.row == STEP]
    assert [span.name for span in spans] == ["step 1", "step 2", "step 3", "step 4"]
    lasted = [span.end_s - span.begin_s for span in spans]
    assert math.isclose(told.last.step_s, lasted[-1], rel_tol=1e-9)
    assert math.isclose(told.total.step_s, sum(lasted), rel_tol=1e-9)
    for account in (told.last, told.total):
        assert set(account.seconds) == set(CAUSES) and min(account.seconds.values()) >= 0
        assert account.seconds["update"] > 0 and account.seconds["other"] > 0


def test_a_step_that_fails_is_not_the_last(wrapped: Any) -> None:
    good = steps(wrapped, 2)
    wrapped.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ConfigError):
        wrapped.step()
    told = offload.report(wrapped)
    assert told.steps == 2 and told.last == good.last
    assert told.total.step_s > good.total.step_s, "its time is not lost"


# --- the ceiling ----------------------------------------------------------------------------------


def test_there_is_one_ceiling_and_it_is_that_of_an_iteration(wrapped: Any) -> None:
    assert offload.report(wrapped).iterations.share_of_ceiling is None
    told = steps(wrapped, 4)
    assert told.speeds.disk_bytes_per_s and told.speeds.update_bytes_per_s
    found, text = told.iterations, str(told)
    assert 0 < found.share_of_ceiling <= 1
    assert found.share_of_ceiling == min(1.0, found.least_s / found.typical_s)
    assert text.count("ceiling") == 1 and not any("ceiling" in name for name in told.to_dict())
    assert found.limit in ("computing", "the disk") and f"{found.limit} alone" in text


def test_speeds_are_bytes_over_the_time_at_work() -> None:
    metrics = Metrics()
    metrics.count("disk_read_bytes", 300)
    metrics.count("disk_written_bytes", 100)
    metrics.count("updated_bytes", 1000)
    metrics._seconds["update"] = 0.5
    step = Event(STEP, "step 2", 10.0, 20.0)
    for event in (
        Event(DISK_READS, "of the step before", 1.0, 9.0, 100),
        Event(DISK_READS, "a", 10.0, 12.0, 300),
        Event(DISK_WRITES, "a", 11.0, 14.0, 100),
        step,
    ):
        metrics.event(event)
    events = metrics.events_since(10.0)
    assert [event.name for event in events] == ["step 2", "a", "a"]
    now, nothing = metrics.snapshot(), Metrics().snapshot()
    assert best_speeds(now, events) == Speeds(400 / 4.0, 1000 / 0.5)
    assert best_speeds(nothing, [step]) == Speeds(None, None)
    assert best_speeds(now, events, Speeds(1.0, None)) == Speeds(400 / 4.0, 1000 / 0.5)
    assert best_speeds(now, events, Speeds(101.0, 2001.0)) == Speeds(101.0, 2001.0)
    assert best_speeds(nothing, [step], Speeds(2.0, None)) == Speeds(2.0, None)


# --- for machines ---------------------------------------------------------------------------------


class Numbers:
    """A writer with an `add_scalar` like TensorBoard's."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert step == 3 and math.isfinite(value)
        self.seen[tag] = value


@pytest.mark.parametrize("count", [0, 3])
def test_to_dict_is_flat_and_strict_json(wrapped: Any, count: int) -> None:
    told = steps(wrapped, count)
    made = told.to_dict()
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert all(isinstance(value, int | float | str) for value in made.values())
    assert all(" " not in key for key in made)
    seconds = [value for key, value in made.items() if key.startswith("last_step/seconds/")]
    assert math.isclose(sum(seconds), made["last_step/step_seconds"], rel_tol=1e-9)
    writer = Numbers()
    told.log_to(writer, 3)
    assert writer.seen["offload/total/disk_written_bytes"] == told.disk_written_bytes
    assert writer.seen["offload/steps"] == count
    assert set(writer.seen) == {f"offload/{k}" for k, v in made.items() if not isinstance(v, str)}


def test_the_table_reads(wrapped: Any) -> None:
    wrapped._offload_session.metrics.fall_back("disk store /x", "no O_DIRECT there")
    text = str(steps(wrapped, 3))
    for words in (
        "an iteration",
        "in all",
        "in step(): update",
        "written to disk",
        "share of the ceiling",
        "best speeds",
        "fall-back: disk store /x",
        "no O_DIRECT there",
    ):
        assert words in text
    assert steps(wrapped, 0).to_dict()["fallback/disk_store_x"] == "no O_DIRECT there"


# --- the trace ------------------------------------------------------------------------------------


def spans_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Sort the spans of the trace by the name of their row, each row in order of time."""
    rows = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in rows.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[rows[event["tid"]]].append(event)
    return {row: sorted(spans, key=lambda e: e["ts"]) for row, spans in found.items()}


def test_the_trace_agrees_with_the_report(wrapped: Any, tmp_path: Path) -> None:
    told = steps(wrapped, 3)
    told.save_trace(tmp_path / "trace.json")
    assert stat.S_IMODE(os.stat(tmp_path / "trace.json").st_mode) == 0o600
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = spans_of(trace)
    assert set(rows) >= {STEP, UPDATE, DISK_READS, DISK_WRITES}
    for row, spans in rows.items():
        for one, after in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= after["ts"] + 1e-3, f"{row}: spans overlap"
        assert all(span["dur"] >= 0 for span in spans)
    last = rows[STEP][-1]
    for cause, seconds in told.last.seconds.items():
        drawn_us = sum(
            span["dur"]
            for row in (UPDATE, WAITING)
            for span in rows.get(row, ())
            if span["ts"] >= last["ts"] and span["name"].split(":")[0] == cause
        )
        if cause != "other":
            assert math.isclose(drawn_us, seconds * 1e6, rel_tol=1e-6, abs_tol=0.1), cause
    written = [span for span in rows[DISK_WRITES] if span["ts"] >= last["ts"]]
    assert {span["name"]: span["args"]["bytes"] for span in written}  # a chunk may be drawn twice
    assert trace["otherData"]["steps"] == 3


def test_a_trace_replaces_files_and_nothing_else(wrapped: Any, tmp_path: Path) -> None:
    told, path = steps(wrapped, 1), tmp_path / "trace.json"
    path.write_text("old")
    path.chmod(0o644)
    told.save_trace(str(path))
    assert json.loads(path.read_text()) and stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ""):
        with pytest.raises(ConfigError, match="expected a new or an ordinary file"):
            told.save_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="nowhere is not there"):
        told.save_trace(tmp_path / "nowhere" / "trace.json")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "trace.json"]


def test_acts_that_overlap_are_drawn_in_turn() -> None:
    """Each moment once, for the act that ended first; the sum is the time at work."""
    a, b, c = (
        Event(DISK_READS, "a", 5.0, 6.0),
        Event(DISK_READS, "b", 0.0, 10.0),
        Event(DISK_READS, "c", 9.0, 12.0),
    )
    apart = Event(DISK_READS, "d", 20.0, 21.0)
    cut = in_turn([c, apart, b, a])
    assert [(e.name, e.begin_s, e.end_s) for e in cut] == [
        ("b", 0.0, 5.0),
        ("a", 5.0, 6.0),
        ("b", 6.0, 10.0),
        ("c", 10.0, 12.0),
        ("d", 20.0, 21.0),
    ]
    assert busy_s([a, b, c, apart]) == 13.0


def test_drawn_acts_never_overlap_and_lose_no_time() -> None:
    generator = torch.Generator().manual_seed(5)
    times = torch.randint(0, 60, (300, 2), generator=generator).tolist()
    events = [Event(DISK_READS, str(n), min(t), max(t)) for n, t in enumerate(times)]
    for some in (events[:3], events[:20], events):
        cut = in_turn(some)
        seconds = [s for e in cut for s in range(int(e.begin_s), int(e.end_s))]
        covered = {s for e in some for s in range(int(e.begin_s), int(e.end_s))}
        assert len(seconds) == len(covered) and set(seconds) == covered
        assert seconds == sorted(seconds)
        assert busy_s(some) == len(covered)


def test_a_step_with_lost_events_is_left_out() -> None:
    kept = [
        Event(UPDATE, "update", 1.0, 2.0),
        Event(STEP, "step 1", 0.0, 3.0),
        Event(UPDATE, "update", 4.0, 5.0),
        Event(STEP, "step 2", 4.0, 6.0),
    ]
    assert whole_steps(kept, some_are_lost=False) == kept
    assert whole_steps(kept, some_are_lost=True) == kept[2:]
    assert whole_steps(kept[:1], some_are_lost=True) == []
    assert to_chrome([])["otherData"]["steps"] == 0 and MOST_EVENTS > 1000


# --- the profiler ---------------------------------------------------------------------------------


def test_phases_are_ranges_of_the_profiler(wrapped: Any) -> None:
    wrapped.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        wrapped.step()
    names = {event.name for event in seen.events()}
    assert {"offload: update", "offload: gradient norm", "offload: disk write"} <= names


# --- logging --------------------------------------------------------------------------------------


def test_what_is_logged(
    tmp_path: Path,
    own_budget: Budget,
    small_chunks: None,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    capfd.readouterr()
    with caplog.at_level(logging.DEBUG, "offload"):
        made = offload.wrap(optimizer(), host_memory=70_000, nvme=tmp_path)
        steps(made, 2).save_trace(tmp_path / "trace")
        made._offload_session.coordinator.store.engine.inject(Fault(FaultKind.ERROR, 1, True, 5))
        with pytest.raises(StoreError):
            made.step()
        made.close()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    told = [one for one in told if not one[1].startswith("fall-back")]  # some file systems have one
    assert [level for level, _ in told] == ["INFO", "ERROR", "WARNING", "DEBUG"]
    assert told[0][1].startswith("AdamW is wrapped:\nparameters") and "on disk" in told[0][1]
    assert "step failed halfway" in told[1][1] and "StoreError: " in told[1][1]
    assert told[2][1].startswith("close(): the optimizer has no state any more")
    assert told[3][1] == "AdamW is closed"
    kept = [arg for record in caplog.records for arg in record.args or ()]
    assert not any(isinstance(arg, BaseException) for arg in kept), "its frames keep the memory"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("rank", "spoken"), [("0", True), ("1", False), ("17", False)])
def test_only_the_first_rank_speaks(
    rank: str,
    spoken: bool,
    own_budget: Budget,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.DEBUG, "offload"):
        offload.wrap(optimizer()).close()
    assert bool(caplog.records) is spoken


# --- a measurement that was asked for -------------------------------------------------------------


def test_measured_speeds_predict_the_step(
    tmp_path: Path, own_budget: Budget, small_chunks: None
) -> None:
    options = {"host_memory": 70_000, "nvme": tmp_path}
    assert offload.plan(optimizer(), **options).predicted_step_s is None
    before = torch.get_rng_state()
    made = optimizer()
    state = torch.get_rng_state()
    plan = offload.plan(made, **options, measure=True)
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(before, state)
    speeds = plan.speeds
    assert speeds.disk_bytes_per_s and speeds.update_bytes_per_s
    assert plan.predicted_step_s == max(
        2 * plan.step_read_bytes / speeds.disk_bytes_per_s,
        plan.step_updated_bytes / speeds.update_bytes_per_s,
    )
    assert own_budget.used_bytes == 0 and not os.listdir(tmp_path)
    offload.wrap(made, **options, measure=True)
    told = steps(made, 2)
    assert told.plan.predicted_step_s and "predicted step()" in str(told)
    numbers = told.to_dict()
    assert numbers["predicted_step_seconds"] == told.plan.predicted_step_s
    # By these names the summary of iterations finds them.
    assert numbers["speed/disk_bytes_per_s"] == told.speeds.disk_bytes_per_s
    assert numbers["speed/update_bytes_per_s"] == told.speeds.update_bytes_per_s
    made.close()


def test_what_cannot_be_measured_is_not_predicted(tmp_path: Path, own_budget: Budget) -> None:
    slow = offload.plan(optimizer(torch.optim.RMSprop), measure=True)
    assert slow.speeds == Speeds() and slow.predicted_step_s is None
    assert "not predicted" in str(slow)


def test_a_budget_that_nobody_gave_is_explained(
    own_budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Memory(64 << 30, 5 << 30, 0, 0, 4 << 30, 3 << 30, 1 << 30)
    monkeypatch.setattr("offload.planning.limits.read_memory", lambda: facts)
    told = (
        r"0 B are allowed.*host_memory was not given: 1 GiB are free of 4 GiB, the limit of this "
        r"container \(cgroup\); of these 1.6 GiB stay free.*give host_memory a number"
    )
    for call in (offload.plan, offload.wrap):
        with pytest.raises(CapacityError, match=told):
            call(optimizer())
    with pytest.raises(CapacityError, match=r"fast drive for the rest$"):
        offload.plan(optimizer(), host_memory=1000)


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "allowed_gib"),
    [(4, 3.5, 1.9), (8, 7, 3.8), (16, 15, 8.6), (24, 20, 12), (64, 60, 47.2), (8, 2, 0)],
)
def test_a_container_of_any_size_has_a_budget(
    total_gib: float,
    free_gib: float,
    allowed_gib: float,
    own_budget: Budget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fifth stays free, at least 8 GiB, and at most two fifths."""
    total, free = (int(gib * 2**30) for gib in (total_gib, free_gib))
    facts = Memory(256 << 30, 200 << 30, 0, 0, total, total - free, free)
    monkeypatch.setattr("offload.planning.limits.read_memory", lambda: facts)
    allowed, _ = host_bytes(offload.Config())
    assert allowed == pytest.approx(allowed_gib * 2**30, abs=4)


# --- beside what the kernel counts ----------------------------------------------------------------


def test_memory_that_the_books_do_not_explain_is_told(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, engine = 400 << 20, own_peak()
    monkeypatch.setattr(HEAP, "base_bytes", base)
    for beyond, is_told in ((299 << 20, False), (700 << 20, True)):
        monkeypatch.setattr(HEAP, "peak_bytes", lambda n=beyond: base + engine + n)
        told = offload.report(wrapped)
        assert told.to_dict()["process/beyond_books_bytes"] == beyond
        assert ("700 MiB more than the 400 MiB before" in str(told)) is is_told
        peak = format_size(base + engine + beyond)
        assert f"peak RSS of the process {peak}" in str(told)


def own_peak() -> int:
    from offload.telemetry import parts

    return parts.HOST.peak_bytes


def test_memory_of_the_process_is_not_told_where_it_is_not_known(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HEAP, "peak_bytes", lambda: None)  # there was more before it was wrapped
    told = offload.report(wrapped)
    assert told.process is None and "at the peak" not in str(told)
    sampled = max((sample.nbytes["process"] for sample in told.samples), default=0)
    assert told.run_facts.numbers.get("process/peak_bytes", 0) == sampled


# --- what a long run remembers --------------------------------------------------------------------


def test_steps_are_remembered_in_little_memory() -> None:
    """The log keeps 4,096, in memory that the first one takes: a long run must not look leaky."""
    log = StepLog()
    causes = [f"step(): cause {n}" for n in range(10)]
    counters = [f"counter_{n}_bytes" for n in range(20)]

    def fact(number: int) -> StepFact:
        seconds = {f"{name}": number + n / 7 for n, name in enumerate(causes)}
        counts = {f"{name}": number * n for n, name in enumerate(counters)}
        return StepFact(number, number / 3, number / 3 + 0.1, seconds, counts)

    log.append(fact(1))
    tracemalloc.start()
    try:
        for number in range(2, 6001):
            log.append(fact(number))
        assert tracemalloc.get_traced_memory()[0] < 16 << 10
    finally:
        tracemalloc.stop()
    assert len(log) == 4096
    found = log.so_far()
    assert found[0].number == 6001 - 4096 and found[-1] == log.last
    whole = fact(6000)
    nothing = whole.counts.pop("counter_0_bytes")
    assert nothing == 0 and log.last == whole, "what was nothing is left out"


def test_reports_of_a_long_run_take_no_more_memory_than_those_of_a_short_one() -> None:
    """Reports are made every few steps, so items are made from columns only when asked for."""
    model = nn.Linear(4, 4)
    with offload.wrap(torch.optim.AdamW(model.parameters()), host_memory="64KiB") as optimizer:

        def step() -> None:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()

        def peak_bytes() -> int:
            str(offload.report(optimizer))
            tracemalloc.start()
            try:
                str(offload.report(optimizer))
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        step()
        first = peak_bytes()
        for _ in range(300):
            step()
        assert peak_bytes() < first + (32 << 10), "300 steps as objects take half a megabyte"
        told = offload.report(optimizer)
        assert len(told.steps_done) == 301 and told.steps_done[-1].number == 301
        assert told.steps_done[:2] == [told.steps_done[0], told.steps_done[1]]
        assert told.events[-1] == list(told.events)[-1]


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
def test_a_report_keeps_nobodys_memory_and_can_still_be_saved(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if kind == "wrap":
        offload.wrap(optimizer, host_memory="600KiB", nvme=tmp_path)
    else:
        offload.prepare(model, optimizer, host_memory="600KiB", nvme=tmp_path)
    model(torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
    told, param = offload.report(optimizer), weakref.ref(next(model.parameters()))
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert param() is None
    told.save_trace(tmp_path / "trace.json")
