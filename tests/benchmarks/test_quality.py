"""The quality benchmark, on a model of some thousand parameters, and what it makes of results."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from offload.core.errors import CapacityError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "examples")
    yield importlib.import_module("quality")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("quality_results")


def options(number: int, folder: Path, **others: Any) -> dict[str, Any]:
    shape = {"steps": 3, "layers": 1, "width": 64, "device": "cpu", "seed": 1}
    return {**shape, "case": number, "directory": str(folder), **others}


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_is_left")
def test_every_tier_learns_the_same_as_torch_in_its_precision(
    quality: ModuleType, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    found = [quality.run_one(options(n, tmp_path)) for n in range(len(quality.CASES))]
    rows = {row.case: row for row in importlib.import_module("quality_results").make_rows(found)}
    assert len(rows) == len(quality.CASES) == 9 and all(row.is_same for row in rows.values())
    digests = {result.digest for result in found}
    assert len(digests) == 3, "one for each precision"
    assert all(4.0 < result.loss < 5.6 and result.step_s > 0 for result in found)
    for precision in (quality.Precision.FP32, quality.Precision.MASTER):
        torchs, wrapped, state, everything = (
            rows[quality.Case(precision, tier)].results[0] for tier in quality.Tier
        )
        assert torchs.disk_bytes == wrapped.disk_bytes == 0 < state.disk_bytes
        assert everything.disk_bytes > 0
        assert everything.host_bytes + everything.disk_bytes > state.disk_bytes, "all is somewhere"
        assert max(everything.host_bytes, state.host_bytes) < wrapped.host_bytes
        assert abs(torchs.host_bytes - wrapped.host_bytes) < 64 << 10
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(120)
def test_a_case_runs_in_a_process_of_its_own(quality: ModuleType, tmp_path: Path) -> None:
    here = quality.run_one(options(0, tmp_path))
    there = quality.run_in_process(options(0, tmp_path))
    assert (here.loss, here.digest, here.host_bytes) == (there.loss, there.digest, there.host_bytes)
    other = quality.run_one(options(0, tmp_path, seed=2))
    assert other.loss != here.loss and other.grown_bytes >= 0


def test_one_seed_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "quality.py", "--seeds", "1"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--seeds: 1 tell nothing of noise" in done.stderr


def test_the_least_memory_is_found(quality: ModuleType) -> None:
    def ask(nbytes: int) -> None:
        if nbytes < 1_234_567:
            raise CapacityError("too little")

    assert 0 <= quality.least_bytes(ask, 1 << 30) - 1_234_567 <= 16 << 10


# --- the table ------------------------------------------------------------------------------------


def made(results: ModuleType, losses: dict[int, list[float]], **changes: Any) -> list[Any]:
    """Make the results of some cases, one for each seed. The digest of the bits follows from the
    precision and the seed. changes: of the one result `at` (case, seed).
    """
    found = []
    for number, each in losses.items():
        for seed, loss in enumerate(each, start=1):
            digest = f"{results.CASES[number].precision.name} {seed}"
            facts = {"loss": loss, "digest": digest, "step_s": 0.5, "device_bytes": None}
            facts |= {"host_bytes": 3 << 20, "disk_bytes": 5 << 20, "grown_bytes": 7 << 20}
            if (number, seed) == changes.get("at"):
                facts |= {name: value for name, value in changes.items() if name != "at"}
            found.append(results.Result(case=number, seed=seed, **facts))
    return found


LOSSES = {0: [2.0, 2.2, 2.1], 2: [2.0, 2.2, 2.1], 4: [2.1, 2.3, 2.3], 8: [2.5, 2.6, 2.4]}


def test_rows_are_compared_seed_by_seed(results: ModuleType) -> None:
    rows = results.make_rows(made(results, LOSSES))
    assert [results.CASES.index(row.case) for row in rows] == [0, 2, 4, 8]
    assert rows[0].band == pytest.approx(0.2)
    assert rows[2].over == pytest.approx([0.1, 0.1, 0.2])
    assert [row.is_within for row in rows] == [True, True, True, False]
    assert all(row.is_same for row in rows)


def test_other_bits_with_one_seed_and_a_loss_beyond_the_noise_are_not_met(
    results: ModuleType,
) -> None:
    assert all(demand.met for demand in results.find_demands(made(results, LOSSES)))
    wrong = made(results, LOSSES, at=(2, 3), digest="another")
    assert [demand.met for demand in results.find_demands(wrong)] == [False, True]
    worse = made(results, {**LOSSES, 4: [2.3, 2.5, 2.4]})
    unmet = [demand for demand in results.find_demands(worse) if not demand.met]
    assert len(unmet) == 1 and unmet[0].measured == "+0.3000"
    assert unmet[0].asked == "within ±0.2000"


def test_the_table_and_the_picture_are_written(results: ModuleType, tmp_path: Path) -> None:
    shape = {"steps": 3, "layers": 1, "width": 64, "device": "cpu", "tokens": 1024}
    path = results.write_quality(
        "make quality", made(results, LOSSES, at=(4, 1), device_bytes=2 << 20), shape, tmp_path
    )
    text = path.read_text()
    assert path.name.startswith("quality_") and path.parent == tmp_path
    assert "3 steps of 1024 tokens" in text and "3 seeds" in text
    assert (
        "| fp32 | wrap, state on NVMe | 2.1000 (2.0000-2.2000) | +0.0000 | yes | the same | 0.500 "
        "|  | 3.0 | 5.0 | 7 |" in text
    )
    assert "| 0.500 | 2.0 | 3.0 | 5.0 | 7 |" in text, "the most on a device"
    assert "| bf16 alone | torch, in memory | 2.5000 (2.4000-2.6000) | +0.4000 | **no** |" in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
