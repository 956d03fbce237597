"""Models that are prepared for a device: the bits of the plain model there, under every schedule,
within every budget.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import load
from fake_accelerator.train_case import SCHEDULES
from preparelib import MODELS, batch, loss_of, make
from torch import nn
from transfer_cases import register

import offload
from offload import planner, prepared, units
from offload.budget import Budget
from offload.pool import Pool

STEPS = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)
    monkeypatch.setattr(prepared, "Pool", partial(Pool, register=register))
    torch.set_num_threads(1)
    yield
    torch.accelerator.synchronize()
    gc.collect()
    assert own_budget.used_bytes == 0


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, clip: bool = True) -> list[Any]:
    """What is seen in some steps: losses, gradients, evaluations."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(1 + step % 2):
            loss = loss_of(model, batch(10 * step + micro).to("fake"))
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        seen += [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen += [loss.detach().cpu(), model(batch(step).to("fake")).cpu()]
        model.train()
    return seen


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) is (b is None), number
        assert a is None or torch.equal(a, b), number


def plain(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, list[Any]]:
    """The plain model on the device; its optimizer's state alone is in host memory."""
    load("eager", 0)
    model = make(name, dtype=dtype).to("fake")
    optimizer = offload.wrap(adamw(model))
    seen = train(model, optimizer)
    return model, optimizer, seen


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_the_bits_are_those_of_the_plain_model(number: int, name: str, tmp_path: Path) -> None:
    theirs, other, seen = plain(name)
    load(*SCHEDULES[number % len(SCHEDULES)])
    ours = make(name)
    mine = adamw(ours)
    offload.prepare(ours, mine, device="fake", nvme=tmp_path)
    assert_equal(train(ours, mine), seen)
    mine.close()
    other.close()
    for p, q in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert p.device.type == "cpu" and torch.equal(p, q.cpu())
