"""Checkpoints of what is trained on a device: the bits of the moment of the save, under every
schedule, loaded into a wrapped optimizer or a prepared model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule
from support.device.prepare_cases import adamw, least_host_bytes, ready
from support.device.transfer_cases import register
from support.models import make
from support.training import train
from torch import Tensor, nn

import offload
from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.optim import coordinator
from offload.params import prepared, units
from offload.planning import planner

SOME = [("eager", 0), ("lazy", 0), ("seeded", 5)]
KINDS = ["wrap", "prepare"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 512)
    for module in (prepared, coordinator):
        monkeypatch.setattr(module, "Pool", partial(Pool, register=register))
    torch.set_num_threads(1)
    yield
    torch.accelerator.synchronize()
    gc.collect()
    assert own_budget.used_bytes == 0


def build(kind: str, folder: Path, seed: int) -> tuple[nn.Module, Any]:
    if kind == "prepare":
        host = least_host_bytes("gpt", torch.float32)
        return ready(folder, host_memory=host, device_memory="64MiB")
    model = make("gpt", seed).to("fake")
    return model, offload.wrap(adamw(model), host_memory="8MiB")


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{name}": value.cpu().clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize("fake", SOME, ids=["eager", "lazy", "seeded"], indirect=True)
@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_training_on_a_device_goes_on(
    fake: DeviceModule, tmp_path: Path, own_budget: Budget, before: str, after: str
) -> None:
    model, optimizer = build(before, tmp_path, seed=0)
    train(model, optimizer, range(0, 2), "fake")
    expected = state_of(model, optimizer)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    losses = train(model, optimizer, range(2, 4), "fake")  # while it is written
    ticket.wait(60.0)
    end = state_of(model, optimizer)
    offload.close(model)
    offload.close(optimizer)
    own_budget.limit(None)
    del model, optimizer

    model, optimizer = build(after, tmp_path, seed=7)
    train(model, optimizer, range(5, 6), "fake")
    offload.load(tmp_path / "c", model, optimizer)
    for name, value in state_of(model, optimizer).items():
        assert torch.equal(value, expected[name]), name
    assert train(model, optimizer, range(2, 4), "fake") == losses
    for name, value in state_of(model, optimizer).items():
        assert torch.equal(value, end[name]), name
    offload.close(model)
    offload.close(optimizer)
