"""Models that are prepared for a device: the bits of the plain model there, under every schedule,
within every budget.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from fake_accelerator import load
from fake_accelerator.train_case import SCHEDULES
from preparelib import MODELS, batch, loss_of, make
from torch import Tensor, nn
from transfer_cases import register

import offload
from offload import planner, prepared, units
from offload.budget import Budget
from offload.errors import CapacityError
from offload.pool import Pool
from offload.prepared import prepared_of
from offload.shares import least_device_bytes, on_device_bytes

STEPS = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)
    monkeypatch.setattr(prepared, "Pool", partial(Pool, register=register))
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # the fake device has no kernel for it
    yield
    torch.backends.mha.set_fastpath_enabled(True)
    torch.accelerator.synchronize()
    gc.collect()
    assert own_budget.used_bytes == 0


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> list[Any]:
    """What is seen in some steps: losses, gradients, evaluations."""
    seen: list[Any] = []
    can_evaluate = not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())  # on the fake
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(1 + step % 2):
            loss = loss_of(model, batch(10 * step + micro).to("fake"))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        seen += [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        model.train(not can_evaluate)
        with torch.no_grad():
            seen += [loss.detach().cpu(), model(batch(step).to("fake")).cpu()]
        model.train()
    return seen


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) is (b is None), number
        assert a is None or torch.equal(a, b), number


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Any], list[Tensor]]:
    """What is seen of the plain model on the device, whose optimizer's state alone is in host
    memory, and how it ends.
    """
    load("eager", 0)
    model = make(name, dtype=dtype).to("fake")
    optimizer = offload.wrap(adamw(model))
    seen = train(model, optimizer)
    optimizer.close()
    return seen, [value.cpu() for value in model.state_dict().values()]


@functools.cache
def least_host_bytes(name: str, dtype: torch.dtype) -> int:
    model = make(name, dtype=dtype)
    with pytest.raises(CapacityError, match="the least that works") as refused:
        offload.prepare(model, adamw(model), device="fake", host_memory=4096, nvme=gettempdir())
    return int(str(refused.value).split("about ")[1].split()[0])


@functools.cache
def device_bytes(name: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """For blocks one unit at a time, for all of them, and for everything else at its peak."""
    load("eager", 0)
    model = make(name, dtype=dtype)
    optimizer = adamw(model)
    offload.prepare(model, optimizer, device="fake")
    train(model, optimizer)
    tier = prepared_of(model).engine.residency.tier
    others = tier.allowance.others_peak_bytes
    found = prepared_of(model).units
    everything = sum(on_device_bytes(unit.nbytes) for unit in found)
    optimizer.close()
    return least_device_bytes(found), everything, others


PAIRS = [
    (name, SCHEDULES[(number + shift) % len(SCHEDULES)], budget)
    for shift, budget in enumerate(["one", "some", "all"])
    for number, name in enumerate(MODELS)
]


def budget_bytes(name: str, dtype: torch.dtype, budget: str) -> int:
    least, everything, others = device_bytes(name, dtype)
    share = {"one": 0.0, "some": 0.5, "all": 1.5}[budget]
    return others + max(least, int(share * everything)) + (3 * others if budget == "all" else 0)


def assert_same_bits(
    name: str,
    dtype: torch.dtype,
    schedule: tuple[str, int],
    folder: Path,
    **options: Any,
) -> dict[str, int]:
    seen, end = plain(name, dtype)
    fake = load(*schedule)
    ours = make(name, dtype=dtype)
    mine = adamw(ours)
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    offload.prepare(ours, mine, device="fake", nvme=folder, **options)
    counts = prepared_of(ours).metrics
    assert_equal(train(ours, mine), seen)
    assert torch.accelerator.max_memory_allocated() <= options.get("device_memory", 1 << 30)
    found = counts.snapshot()
    assert not found.fallbacks
    mine.close()
    for p, q in zip(ours.state_dict().values(), end, strict=True):
        assert p.device.type == "cpu" and torch.equal(p, q)
    assert fake.counters()["kernels"]
    return dict(found.counts)


@pytest.mark.parametrize(("name", "schedule", "budget"), PAIRS)
def test_the_bits_are_those_of_the_plain_model(
    name: str, schedule: tuple[str, int], budget: str, tmp_path: Path
) -> None:
    dtype = torch.float32
    options: dict[str, Any] = {"device_memory": budget_bytes(name, dtype, budget)}
    if budget != "all":
        options["host_memory"] = least_host_bytes(name, dtype)
    counts = assert_same_bits(name, dtype, schedule, tmp_path, **options)
    assert ("device_drops" in counts) or (budget == "all")
