"""Runs of models that are prepared for a device, beside those of plain models there: what both see
must be the same, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from fake_accelerator import load
from torch import Tensor, nn

import offload
from offload.core.errors import CapacityError
from offload.params.placeholder import is_offloaded
from offload.params.prepared import prepared_of
from offload.planning.unit import UnitSizes, on_device_bytes
from support.allowance import CHECKS
from support.bits import assert_same_tensors
from support.loops import chosen
from support.models import batch, loss_of, make

STEPS = chosen(test=5, torture=10)
FEW_STEPS = 3  # enough for a fault to be noticed


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[Any]:
    """Train some steps, and return what is seen: losses, gradients, evaluations."""
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


@functools.cache
def plain(name: str, dtype: torch.dtype, steps: int) -> tuple[list[Any], list[Tensor]]:
    """Train the plain model on the device, with only the optimizer's state in host memory.

    Returns what is seen, and the values at the end.
    """
    load("eager", 0)
    model = make(name, dtype=dtype).to("fake")
    optimizer = offload.wrap(adamw(model))
    seen = train(model, optimizer, steps)
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
    """Measure the device memory of a training.

    Returns the bytes for blocks one unit at a time, for all blocks, and for everything else at its
    peak.
    """
    load("eager", 0)
    model = make(name, dtype=dtype)
    optimizer = adamw(model)
    offload.prepare(model, optimizer, device="fake")
    train(model, optimizer, STEPS)
    tier = prepared_of(model).engine.residency.tier
    others = tier.device_budget.others_peak_bytes
    found = prepared_of(model).units
    everything = sum(on_device_bytes(unit.nbytes) for unit in found)
    optimizer.close()
    return UnitSizes.of(found).least_device_bytes, everything, others


def budget_bytes(name: str, dtype: torch.dtype, budget: str) -> int:
    least, everything, others = device_bytes(name, dtype)
    share = {"one": 0.0, "some": 0.5, "all": 1.5}[budget]
    return others + max(least, int(share * everything)) + (3 * others if budget == "all" else 0)


def assert_same_bits(
    name: str,
    dtype: torch.dtype,
    schedule: tuple[str, int],
    folder: Path,
    steps: int = STEPS,
    **options: Any,
) -> dict[str, int]:
    seen, end = plain(name, dtype, steps)
    fake = load(*schedule)
    ours = make(name, dtype=dtype)
    mine = adamw(ours)
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    offload.prepare(ours, mine, device="fake", nvme=folder, **options)
    counts = prepared_of(ours).metrics
    assert_same_tensors(train(ours, mine, steps), seen)
    assert torch.accelerator.max_memory_allocated() <= options.get("device_memory", 1 << 30)
    found = counts.snapshot()
    assert not found.fallbacks, found.fallbacks
    assert "gradients_outside_of_their_place" not in found.counts
    mine.close()
    for p, q in zip(ours.state_dict().values(), end, strict=True):
        assert p.device.type == "cpu" and torch.equal(p, q)
    assert fake.counters()["kernels"]
    return dict(found.counts)


def ready(folder: Path | None = None, **options: Any) -> tuple[nn.Module, Any]:
    model = make("gpt")
    return offload.prepare(model, adamw(model), device="fake", nvme=folder, **options)


def trains_right(folder: Path, schedule: tuple[str, int]) -> None:
    options = {"host_memory": least_host_bytes("gpt", torch.float32)}
    for budget in ("one", "some"):
        options["device_memory"] = budget_bytes("gpt", torch.float32, budget)
        assert_same_bits("gpt", torch.float32, schedule, folder, FEW_STEPS, **options)


def large_loss(model: nn.Module) -> None:
    """Run forward and backward with a loss that takes more device memory than the model."""
    logits = model(batch(0).to("fake"))
    torch.cat([logits] * 30).square().mean().backward()


@functools.cache
def large_loss_bytes() -> int:
    load("eager", 0)
    gc.collect()  # memory that other tests left is not this model's
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    model, _ = ready()
    for _ in range(2):
        large_loss(model)
    found = prepared_of(model)
    others = found.engine.residency.tier.device_budget.others_peak_bytes
    offload.close(model)
    return int(others) + UnitSizes.of(found.units).least_device_bytes


def starts_right(folder: Path, schedule: tuple[str, int]) -> None:
    """Check that even the first step is within the budget."""
    limit = large_loss_bytes()
    load(*schedule)
    gc.collect()
    torch.accelerator.empty_cache()
    model, _ = ready(folder, device_memory=limit)
    torch.accelerator.reset_peak_memory_stats()
    try:
        large_loss(model)
        assert torch.accelerator.max_memory_allocated() <= limit
    finally:
        offload.close(model)


@functools.cache
def plain_sums() -> list[Tensor]:
    load("eager", 0)
    return sums_of(make("gpt").to("fake"))


def sums_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of several passes, some of which are still held when the next begins."""
    seen = []
    for seed in range(5):
        loss_of(model, batch(seed).to("fake")).backward()
        if seed in (1, 3):  # so that the last pass is the first into its gradients
            seen += [p.grad for p in model.parameters()]
            model.zero_grad()
    seen += [p.grad for p in model.parameters()]
    return [grad.cpu() for grad in seen]


def adds_right(folder: Path, schedule: tuple[str, int]) -> None:
    expected = plain_sums()
    load(*schedule)
    model, _ = ready(folder)
    try:
        assert_same_tensors(sums_of(model), expected)
    finally:
        offload.close(model)


def louder(module: nn.Module, _: object) -> None:
    module.weight.mul_(1.1)


def edits(model: nn.Module, resident: Callable[..., Any]) -> list[Tensor]:
    """Change values and gradients in every way, and return the outputs and values after each."""
    tokens = batch(0).to("fake")
    with torch.no_grad():
        seen = [model(tokens)]
        with resident(model.layers[1]):
            model.layers[1].up.weight.data.mul_(1.5)
            seen.append(model.layers[1].up.weight.clone())
        seen += [model(tokens), model.state_dict()["layers.1.up.weight"].clone()]
        hook = model.norm.register_forward_pre_hook(louder)
        seen.append(model(tokens))
        hook.remove()
        seen += [model(tokens), model.state_dict()["norm.weight"].clone()]
        model.load_state_dict({**make("gpt", 4).state_dict()})
        seen.append(model(tokens))
    loss_of(model, tokens).backward()
    with resident(model.norm):
        model.norm.weight.grad.add_(1.0)
    seen.append(model.norm.weight.grad)
    return [one.cpu() for one in seen]


@functools.cache
def plain_edits() -> list[Tensor]:
    load("eager", 0)
    return edits(make("gpt").to("fake"), lambda module: contextlib.nullcontext())


def edits_right(folder: Path, schedule: tuple[str, int]) -> None:
    expected = plain_edits()
    load(*schedule)
    model, _ = ready(folder)
    try:
        assert_same_tensors(edits(model, offload.resident), expected)
        assert all(is_offloaded(p) for p in model.parameters())
    finally:
        offload.close(model)


def look_back(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Compute outputs, change the values, and only then read the outputs."""
    seen: list[Tensor] = []
    for seed in range(2):
        loss_of(model, batch(seed).to("fake")).backward()
        with torch.no_grad():
            before = model(batch(9).to("fake"))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(before.cpu())
        with torch.no_grad():
            before = model(batch(9).to("fake"))
            model.load_state_dict(make("gpt", 5 + seed).state_dict())
        seen.append(before.cpu())
        hook = model.norm.register_forward_pre_hook(rebind)
        with torch.no_grad():
            seen.append(model(batch(9).to("fake")).cpu())
        hook.remove()
    return seen


def rebind(module: nn.Module, _: object) -> None:
    module.weight.data = module.weight.data * 1.25


@functools.cache
def plain_back() -> list[Tensor]:
    load("eager", 0)
    model = make("gpt").to("fake")
    optimizer = offload.wrap(adamw(model))
    seen = look_back(model, optimizer)
    optimizer.close()
    return seen


def looks_back_right(folder: Path, schedule: tuple[str, int]) -> None:
    expected = plain_back()
    for budget in ("one", "all"):
        limit = budget_bytes("gpt", torch.float32, budget) + (2 << 10)
        load(*schedule)
        model, optimizer = ready(folder, device_memory=limit)
        try:
            assert_same_tensors(look_back(model, optimizer), expected)
        finally:
            offload.close(model)


def allows_right(folder: Path, schedule: tuple[str, int]) -> None:
    """Check `DeviceBudget` on a device whose memory is only counted.

    Whether the fake device gets too full depends on the prefetch depth, and so on the time that the
    disk takes.
    """
    for check in CHECKS:
        check()


SCENES = [allows_right, starts_right, trains_right, adds_right, edits_right, looks_back_right]


def expect_training() -> None:
    plain("gpt", torch.float32, FEW_STEPS)
    least_host_bytes("gpt", torch.float32)
    device_bytes("gpt", torch.float32)


EXPECTED = [
    large_loss_bytes,
    expect_training,
    plain_sums,
    plain_edits,
    plain_back,
]  # what the scenes are compared with
