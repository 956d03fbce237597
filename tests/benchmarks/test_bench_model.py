"""The benchmarks of prepared models, on a model of a few thousand parameters."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import contestants

ROOT = Path(__file__).parents[2]
TASK = {"layers": 2, "width": 128, "heads": 2, "tokens": 16, "vocabulary": 512}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(subprocess, "Popen", contestants.start)
    return importlib.import_module


@pytest.fixture
def sitting(load: Any, tmp_path: Path) -> Any:
    contest, results = load("wrap_contest"), load("model_results")
    task = {"task": {**TASK, "dtype": "bfloat16"}}
    tight = {"host_memory": 2400 << 10, "nvme": str(tmp_path)}
    entries = [
        contest.Entry(results.TORCH, "torch", dict(task)),
        contest.Entry(results.HOST, "offload", dict(task)),
        contest.Entry(results.RESIDENT, "prepared", dict(task)),
        contest.Entry(results.DISK, "prepared", {**task, **tight}),
    ]
    return contest.sit(results.MANY, entries, tmp_path, rounds=2)


def test_prepared_models_take_part(
    load: Any, sitting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: ModuleType = load("model_results")
    load("bench_model").check_losses(sitting)
    disk, resident = sitting.find(results.DISK), sitting.find(results.RESIDENT)
    assert disk.facts["on_disk"] > 0 == resident.facts["on_disk"]
    assert disk.facts["pool_peak"] <= 2400 << 10
    assert any(step.counts.get("disk_read_bytes", 0) for step in disk.steps)
    assert 0 < results.stall_share(disk) < 1 and results.stall_share(resident) == 0
    assert results.stall_share(disk, only_parameters=True) <= results.stall_share(disk)
    assert {demand.asked for demand in results.find_demands(sitting)} == {
        "at most 1.03",
        "at most 1.30",
        "below 5 %",
    }

    sitting.fio_bytes_per_s = [1e9, 2e9]
    sitting.absent = {results.TUNED_NVME: "not installed"}
    monkeypatch.setattr(results, "HERE", tmp_path)
    text = results.write_model("model", "make bench", [sitting]).read_text()
    assert f"| 2,048 tokens | {results.DISK} |" in text and "on disk 0.00" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| 2,048 tokens")}
    assert widths == {len(results.HEADINGS) + 1, 6}, "tables of these widths, and no ragged row"
    assert list(tmp_path.glob("model_*.png"))
    with_a_peer(sitting, results)


def with_a_peer(sitting: Any, results: ModuleType) -> None:
    """Check that with few tokens a tuned peer brings demands on time and on memory."""
    sitting.what = results.FEW
    peer = sitting.find(results.TORCH)
    object.__setattr__(peer.entry, "name", results.TUNED_NVME)
    asked = {demand.asked: demand for demand in results.find_demands(sitting)}
    assert set(asked) == {"at most 1.03", "at least 1.00", "at most 0.50"}
    peer.facts["now"]["peak_rss"] *= 1000
    for turn in peer.turns:
        turn[:] = [type(step)(**{**vars(step), "whole_s": 1000.0}) for step in turn]
    assert all(
        demand.met for demand in results.find_demands(sitting) if demand.asked != "at most 1.03"
    )


def test_two_checkouts_train_the_same_by_turns(load: Any, tmp_path: Path) -> None:
    pairs, contest = load("pairs"), load("wrap_contest")
    entry = contest.Entry("prepared", "prepared", {"task": {**TASK, "dtype": "bfloat16"}})
    this, that = pairs.run_pairs(entry, ROOT, tmp_path, rounds=2)
    assert that.entry.root == ROOT and len(this.turns) == len(that.turns) == 2
    assert "2 pairs" in pairs.tell("all", this, that)
    assert pairs.tell("all", this, that).endswith("losses equal")
    that.turns.reverse()
    assert pairs.tell("all", this, that).endswith("losses DIFFER")


def test_a_run_larger_than_memory_is_told(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, results = load("bench_larger_than_memory"), load("large_results")
    for name, value in {"WIDTH": 128, "HEADS": 2, "BUDGET_BYTES": 18 << 20}.items():
        monkeypatch.setattr(bench, name, value)
    for name, value in {"width": 128, "heads": 2, "vocabulary": 512}.items():
        monkeypatch.setitem(bench.TASK, name, value)
    monkeypatch.setenv("OFFLOAD_BENCH_LAYERS", "8")
    monkeypatch.setattr(bench, "Fio", lambda *_: type("Fio", (), {"close": lambda self: None})())
    monkeypatch.setattr(bench, "mixed_rate", lambda _: 1e9)
    run = bench.train(tmp_path)
    assert len(run.steps) == 3 and run.on_disk_bytes > 0 and run.compute_s > 0
    losses, _, _ = results.find_demands(run, 11 << 30)
    assert losses.asked == "falls" and run.steps[0].loss > run.steps[2].loss
    step = run.steps[2]
    assert run.bound_s(step) == pytest.approx(1.3 * step.moved_bytes / 1e9 + run.compute_s)
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(load("model_results"), "HERE", tmp_path)
    text = results.write_large("make bench", run).read_text()
    assert "| 3 |" in text and "below 11 GiB" in text and "by cause: " in text


def test_no_room_on_disk_is_said_before_anything_is_made(load: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="GiB are free"):
        load("bench_larger_than_memory").check_room(tmp_path, 10**6)
