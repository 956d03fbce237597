"""The benchmark of a training step, on a model of a few thousand parameters."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import contestants

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TASK = {"layers": 1, "width": 128, "heads": 2, "tokens": 16, "vocabulary": 512}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(subprocess, "Popen", contestants.start)
    return importlib.import_module("wrap_contest"), importlib.import_module("wrap_results")


def sit(modules: tuple[ModuleType, ModuleType], tmp_path: Path, *names: str) -> Any:
    contest, results = modules
    task = {"task": {**TASK, "dtype": "float32"}}
    entries = {
        results.TORCH: contest.Entry(results.TORCH, "torch", dict(task)),
        results.HOST: contest.Entry(results.HOST, "offload", dict(task)),
        results.NVME: contest.Entry(
            results.NVME, "offload", {**task, "host_memory": 1 << 20, "nvme": str(tmp_path)}
        ),
        "broken": contest.Entry("broken", "torch", {"task": {"layers": "many"}}),
        "DeepSpeed": contest.Entry("DeepSpeed", "deepspeed", {**task, "optimizer": {}}),
    }
    return contest.sit("fp32", [entries[name] for name in names], tmp_path, rounds=2)


def test_everybody_trains_the_same(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = modules[1]
    sitting = sit(modules, tmp_path, results.TORCH, results.HOST, results.NVME)
    losses = [[step.loss for step in runner.steps] for runner in sitting.runners]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 4
    assert losses[0][0] != losses[0][-1]
    disk = sitting.find(results.NVME)
    planned = disk.facts["planned_read"] + disk.facts["planned_written"]
    assert planned > 0 and disk.facts["pool_peak"] <= disk.facts["budget"] == 1 << 20
    if disk.steps[0].moved_bytes:  # a file system in memory moves none
        assert all(0.9 * planned < step.moved_bytes <= planned for step in disk.steps)

    sitting.fio_bytes_per_s = [1e9, 2e9]
    monkeypatch.setattr(results, "HERE", tmp_path)
    text = results.write_wrap("make bench", [sitting]).read_text()
    assert "| fp32 | offload, NVMe |" in text and "at most 1.15" in text
    assert "1.50 (1.25-1.75) GB/s" in text and list(tmp_path.glob("wrap_*.png"))


def test_who_cannot_take_part_is_named(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sitting = sit(modules, tmp_path, modules[1].TORCH, "broken", "DeepSpeed")
    assert [runner.name for runner in sitting.runners] == [modules[1].TORCH]
    assert "TypeError" in sitting.absent["broken"]
    assert "make peers" in sitting.absent["DeepSpeed"]


def test_ours_must_take_part(modules: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    contest = modules[0]
    small = {"task": TASK, "host_memory": 1000, "nvme": str(tmp_path)}
    entry = contest.Entry("ours", "offload", small)
    with pytest.raises(contest.PeerFailed, match="CapacityError"):
        contest.sit("", [entry], tmp_path, rounds=1)
