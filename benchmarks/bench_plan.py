"""What `offload plan` says beside what then happens: `make bench ONLY=plan`, or pytest
benchmarks/bench_plan.py.

`offload bench` measures the machine, `offload.plan` is asked for a decoder by its size within
several budgets, and the same decoder is trained within them. Bytes must agree within 3 %; times,
with the speed that the run's own drive had in place of the profile's, within 20 %. The model has
never run when it is planned: its compute comes from counted operations and the profile's FLOP/s.
OFFLOAD_BENCH_ROUNDS changes the number of turns, OFFLOAD_BENCH_DIR the directory.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_predict import STEPS, WARM_UP, disk_rates, iteration_s, moved_bytes
from contest import rounds
from model_results import result_path
from predict_results import Prediction
from results import HERE, machine_header

import offload
from offload.planning import profile
from offload.planning.profile import Profile
from offload.telemetry import run_file
from offload.telemetry.run_file import Run
from offload.tools.forecast.sources import find_source

SIZE, SEQUENCE = "100M", 256
TRAINED_BYTES = 16
NEAR, BYTES_NEAR = 0.20, 0.03


@dataclass(frozen=True)
class Setup:
    """A configuration. share: of what training takes, the part that host memory has room for."""

    share: float
    batch: int
    dtype: str = "float32"

    def __str__(self) -> str:
        tokens = self.batch * SEQUENCE
        return f"{SIZE}, {self.dtype}, {tokens} tokens, {self.share:.0%} in memory"


SETUPS = (Setup(0.75, 2), Setup(0.45, 2), Setup(0.45, 8), Setup(0.35, 1), Setup(0.4, 2, "bfloat16"))


def train(setup: Setup, host_bytes: int, directory: Path) -> Run:
    """Train some steps of the very model that the plan is for; return the run from its file."""
    torch.manual_seed(20261117)
    source = find_source(SIZE)
    model = source.make_model().to(getattr(torch, setup.dtype))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with TemporaryDirectory(dir=directory, prefix="plan-") as folder:
        model, optimizer = offload.prepare(
            model, optimizer, device="cpu", host_memory=host_bytes, nvme=folder
        )
        with optimizer:
            batch = source.make_batch(setup.batch, SEQUENCE)
            for _ in range(WARM_UP + STEPS):
                source.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            offload.report(optimizer).save_trace(Path(folder) / "run.json")
        return run_file.load(Path(folder) / "run.json")


def with_rates(machine: Profile, run: Run) -> Profile:
    rates = disk_rates(run.events)
    return replace(
        machine,
        disk_read_bytes_per_s=rates["read"],
        disk_write_bytes_per_s=rates["write"],
        disk_mixed_bytes_per_s=rates["mixed"],
    )


def compare(setup: Setup, machine: Profile, directory: Path, row: Prediction) -> None:
    with torch.device("meta"):
        numel = sum(param.numel() for param in find_source(SIZE).make_model().parameters())
    host_bytes = int(setup.share * TRAINED_BYTES * numel)
    run = train(setup, host_bytes, directory)
    path = directory / "plan_machine.json"
    with_rates(machine, run).save(path)
    asked: dict[str, Any] = {"batch": setup.batch, "sequence": SEQUENCE, "dtype": setup.dtype}
    told: Any = offload.plan(SIZE, host_memory=host_bytes, nvme_count=1, on=str(path), **asked)
    path.unlink()
    row.predicted_s.append(told.timing.step_s)
    row.measured_s.append(iteration_s(run))
    row.predicted_bytes.append(told.read_bytes + told.written_bytes)
    row.measured_bytes.append(moved_bytes(run))
    row.limit = told.timing.limit
    print(f"{row.name}: {row.measured_s[-1]:.3f} s, predicted {row.predicted_s[-1]:.3f} s")


def test_plans(benchmark: Any, bench_directory: Path) -> None:
    rows = [Prediction(str(setup)) for setup in SETUPS]
    path = bench_directory / "plan_profile.json"

    def go_round() -> None:
        command = [sys.executable, "-m", "offload", "bench", str(bench_directory)]
        command += ["--only", "memory,update,disk,compute", "--output", str(path)]
        subprocess.run(command, check=True)
        machine = profile.load(path)
        path.unlink()
        for setup, row in zip(SETUPS, rows, strict=True):
            compare(setup, machine, bench_directory, row)

    benchmark.pedantic(go_round, rounds=rounds(1))
    lines = table(rows)
    print("\n".join(lines))
    for row in rows:
        benchmark.extra_info[row.name] = row.ratio
    assert all(abs((row.bytes_ratio or 1) - 1) <= BYTES_NEAR for row in rows), rows
    assert all(abs(row.ratio - 1) <= NEAR for row in rows), rows
    HERE.mkdir(exist_ok=True)
    result_path("plan").write_text("\n".join(lines) + "\n")


def table(rows: list[Prediction]) -> list[str]:
    middle = statistics.median
    lines = [
        "# plan",
        "",
        *machine_header(),
        "- command: `make bench ONLY=plan`",
        "- asked before the model was made, on the profile of `offload bench` in the same session "
        "with the drive's speed of the run itself",
        "",
        "| plan | measured, s | predicted, s | ratio | GB moved | bytes, ratio | what limits |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        share = "" if row.bytes_ratio is None else f"{row.bytes_ratio:.3f}"
        lines.append(
            f"| {row.name} | {middle(row.measured_s):.3f} | {middle(row.predicted_s):.3f} | "
            f"{row.ratio:.2f} | {middle(row.measured_bytes) / 1e9:.2f} | {share} | {row.limit} |"
        )
    return lines
