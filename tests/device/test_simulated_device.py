"""The simulator copies to and from a device what the engine copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule
from support.device.prepare_cases import adamw, budget_bytes, device_bytes, least_host_bytes
from support.device.transfer_cases import register
from support.models import batch, loss_of, make

import offload
from offload.core.pool import Pool
from offload.params import prepared, units
from offload.planning import planner
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuning
from offload.planning.unit import DEVICE_SPARE_BYTES
from offload.telemetry import run_file
from offload.telemetry.run_file import Run
from offload.tools.forecast.simulator import simulate
from offload.tools.forecast.workload import Workload

STEPS = 6
MACHINE = Profile(
    name="a machine",
    is_measured=False,
    sources=(),
    date="",
    cpu="",
    cores=1,
    update_bytes_per_s=8e9,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=2e9,
    disk_mixed_bytes_per_s=2e9,
    to_device_bytes_per_s=1e10,
    to_host_bytes_per_s=1e10,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 256)
    monkeypatch.setattr(prepared, "Pool", partial(Pool, register=register))
    yield
    torch.accelerator.synchronize()


def record(directory: Path, host_bytes: int, device_bytes: int | None) -> Run:
    model: Any = make("gpt")
    optimizer: Any = adamw(model)
    model, optimizer = offload.prepare(
        model,
        optimizer,
        device="fake",
        host_memory=host_bytes,
        device_memory=device_bytes,
        prefetch_depth=2,
        nvme=directory,
    )
    with optimizer:
        for step in range(STEPS):
            loss_of(model, batch(step).to("fake")).backward()
            optimizer.step()
            optimizer.zero_grad()
        offload.report(optimizer).save_trace(directory / "run.json")
    return run_file.load(directory / "run.json")


def copied(run: Run, activation_bytes: int = 0) -> tuple[list[int], list[float]]:
    """Return the bytes that an iteration moves: as simulated, and as measured."""
    work = replace(Workload.of_run(run), activation_bytes=activation_bytes)
    budgets = Budgets(run.about.host_bytes, run.about.device_bytes, 1, "keep")
    found = simulate(work, budgets, MACHINE, Tuning(prefetch_depth=2), STEPS)
    steps, counts = run.about.steps[2:], ("host_to_device", "device_to_host", "disk_read")
    real = [sum(s.counts.get(f"{c}_bytes", 0) for s in steps) / len(steps) for c in counts]
    return [found.to_device_bytes, found.to_host_bytes, found.read_bytes], real


@pytest.mark.parametrize("fake", [("eager", 0)], ids=["eager"], indirect=True)
@pytest.mark.parametrize("times", [1.0, 1.5, 20])
def test_copies_are_those_of_a_real_run(
    fake: DeviceModule, times: float, seed: int, tmp_path: Path
) -> None:
    """With any amount of host memory; the device has room for all."""
    host = int(times * least_host_bytes("gpt", torch.float32))
    simulated, real = copied(record(tmp_path, host, None))
    assert simulated == pytest.approx(real, rel=0.03)
    assert (real[2] > 0) == (times < 20)


@pytest.mark.parametrize("fake", [("eager", 0)], ids=["eager"], indirect=True)
@pytest.mark.parametrize("budget", ["one", "some"])
def test_a_device_with_less_room_is_copied_to_more(
    fake: DeviceModule, budget: str, seed: int, tmp_path: Path
) -> None:
    """Roughly: how activations grow within a unit is not known."""
    host = 20 * least_host_bytes("gpt", torch.float32)
    limit = budget_bytes("gpt", torch.float32, budget)
    _, _, others = device_bytes("gpt", torch.float32)
    simulated, real = copied(record(tmp_path, host, limit), others - DEVICE_SPARE_BYTES)
    assert simulated[0] == pytest.approx(real[0], rel=0.1)
    assert simulated[1] == pytest.approx(real[1], rel=0.03)
