"""Wrapped optimizers with parameters on a device: the bits of the host, under every schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule, load
from fake_accelerator.train_case import SCHEDULES
from support.device.transfer_cases import register
from torch import Tensor, nn

import offload
from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.device.device import DeviceTransfer, Mark
from offload.optim import coordinator
from offload.optim.pipeline import Pipeline
from offload.planning import planner

SIZES = [(70, 30), (5,), (40, 40), (), (1, 1), (0, 3)]
STEPS = 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 1024)
    monkeypatch.setattr(coordinator, "Pool", partial(Pool, register=register))


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def on_device(values: list[Tensor], where: list[str]) -> list[nn.Parameter]:
    return [nn.Parameter(v.clone().to(where[i % len(where)])) for i, v in enumerate(values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("where", [["fake"], ["fake:0", "cpu", "fake:1"]], ids=["one", "several"])
def test_the_bits_are_those_of_the_host(
    fake: DeviceModule,
    tmp_path: Path,
    dtype: torch.dtype,
    on_disk: bool,
    where: list[str],
    own_budget: Budget,
) -> None:
    """The device computes gradients until the very moment of the step, and reads the parameters
    right after it.
    """
    start = tensors(0, dtype)
    there, here = on_device(start, where), on_device(start, ["cpu"])
    wrapped = torch.optim.AdamW(there, lr=1e-2)
    plain = torch.optim.AdamW(here, lr=1e-2)
    options: dict[str, Any] = {}
    if on_disk:
        plan = replace(offload.plan(wrapped), has_grad_buffers=False)
        least = plan.staging_buffers * plan.staging_buffer_bytes + 2 * max(
            chunk.nbytes for chunk in plan.chunks
        )
        options = {"host_memory": least, "nvme": tmp_path}
    offload.wrap(wrapped, **options)
    assert bool(offload.report(wrapped).plan.disk_bytes) is on_disk
    own_budget.limit(None)
    offload.wrap(plain)
    for step in range(STEPS):
        for p, q, g in zip(there, here, tensors(step + 1, dtype), strict=True):
            p.grad = (g.to(p.device) + p.detach()) * 1  # late work of the device
            q.grad = (g + q.detach()) * 1
        wrapped.step()
        plain.step()
        after = [(p.detach() * 2).cpu() for p in there]  # early work on the new parameters
        for a, q in zip(after, here, strict=True):
            assert torch.equal(a, q.detach() * 2)
    ours, theirs = wrapped.state_dict()["state"], plain.state_dict()["state"]
    for number, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[number][name], value) and ours[number][name].is_cpu
    assert not offload.report(wrapped).fallbacks
    wrapped.close()
    plain.close()


def train(schedule: str, seed: int) -> bytes:
    """Take a few steps on a device that is late with gradients and early with parameters; return
    the bytes that it computed from old and new parameters.
    """
    load(schedule, seed)
    params = on_device(tensors(0, torch.bfloat16), ["fake"])
    optimizer = offload.wrap(torch.optim.AdamW(params, lr=1e-2))
    seen = []
    try:
        for step in range(3):
            for p, g in zip(params, tensors(step + 1, torch.bfloat16), strict=True):
                p.grad = (g.to("fake") + p.detach()) * 1
            late = [p.detach() * 3 for p in params]  # still reads the old parameters
            optimizer.step()
            seen += [*late, *(p.detach() * 2 for p in params)]
        return b"".join(one.cpu().view(-1).view(torch.uint8).numpy().tobytes() for one in seen)
    finally:
        torch.accelerator.synchronize()
        optimizer.close()


def no_join(transfer: DeviceTransfer) -> None:
    """Let the device go on without waiting for its new parameters."""


def no_mark(transfer: DeviceTransfer) -> Mark:
    """Mark an empty stream, so that no copy waits for earlier work of the device."""
    stream = torch.accelerator.current_stream(transfer.device)
    return Mark(stream, torch.Stream(transfer.device).record_event())


def no_wait(pipeline: Pipeline, flight: Any, cause: str) -> None:
    """Drop the staging buffer's tickets: the CPU does not wait for the bytes it works on."""
    if flight.staging_buffer is not None:
        flight.staging_buffer.tickets = []


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (DeviceTransfer, "join", no_join),
        (DeviceTransfer, "mark", no_mark),
        (Pipeline, "_wait", no_wait),
    ],
    ids=["join", "mark", "wait"],
)
def test_every_wait_of_a_step_is_needed(
    owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {train(*schedule) for schedule in SCHEDULES}
    assert len(right) == 1
    monkeypatch.setattr(owner, name, fault)
    assert any(train(*schedule) not in right for schedule in SCHEDULES)


def test_a_step_copies_nothing_through_pageable_memory(fake: DeviceModule) -> None:
    params = on_device(tensors(0, torch.bfloat16), ["fake"])
    optimizer = offload.wrap(torch.optim.AdamW(params, lr=1e-2))
    for p in params:
        p.grad = torch.ones_like(p)
    torch.accelerator.synchronize()
    fake.reset_counters()
    optimizer.step()
    moved = sum(p.nbytes for p in params)
    counted = fake.counters()
    assert counted["pageable_bytes"] == counted["blocking_copies"] == 0
    assert (counted["h2d_bytes"], counted["d2h_bytes"]) == (moved, 2 * moved)
    optimizer.close()


def test_weights_that_were_loaded_win(fake: DeviceModule) -> None:
    (param,) = on_device([torch.ones(300).bfloat16()], ["fake"])
    optimizer = offload.wrap(torch.optim.SGD([param], lr=0.5))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param.detach().cpu().eq(0.5).all()
    param.data = torch.full_like(param, 3.0)  # what no version counter sees
    optimizer.step()
    assert param.detach().cpu().eq(2.5).all()
    optimizer.close()


def test_fused_clipping(fake: DeviceModule) -> None:
    there, here = (on_device(tensors(0, torch.float32), [where]) for where in ("fake", "cpu"))
    wrapped = [
        offload.wrap(torch.optim.AdamW(params, lr=1e-2), max_grad_norm=0.5)
        for params in (there, here)
    ]
    for p, q, g in zip(there, here, tensors(1, torch.float32), strict=True):
        p.grad, q.grad = g.to("fake"), g.clone()
    for optimizer in wrapped:
        optimizer.step()
    torch.testing.assert_close(wrapped[0].grad_norm, wrapped[1].grad_norm, rtol=1e-12, atol=0)
    for p, q in zip(there, here, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-6, atol=1e-7)
    for optimizer in wrapped:
        optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_optimizer_steps_on_its_device(fake: DeviceModule, dtype: torch.dtype) -> None:
    """Its state is there and of the parameters' type, as torch itself would have made it."""
    there, here = (on_device(tensors(0, dtype), [where]) for where in ("fake", "cpu"))
    optimizers = [torch.optim.Adam(params, lr=1e-2, foreach=False) for params in (there, here)]
    offload.wrap(optimizers[0])
    offload.wrap(optimizers[1])
    for turn in range(3):
        for p, q, g in zip(there, here, tensors(turn + 1, dtype), strict=True):
            p.grad, q.grad = g.to("fake"), g.clone()
        for optimizer in optimizers:
            optimizer.step()
            if turn == 1:
                optimizer.close()
    for p, q in zip(there, here, strict=True):
        state = optimizers[0].state[p]
        assert state["exp_avg"].device == p.device and state["exp_avg"].dtype == dtype
        assert state["step"].is_cpu and float(state["step"]) == 3
        torch.testing.assert_close(p.detach().cpu(), q.detach())


@pytest.mark.parametrize("where", [["fake"], ["fake:0", "cpu", "fake:1"]], ids=["one", "several"])
def test_sgd_without_state_passes_over_staging_buffers(
    fake: DeviceModule, where: list[str]
) -> None:
    """It has chunks of no bytes; nothing goes through pageable memory."""
    there, here = (on_device(tensors(0, torch.float32), devices) for devices in (where, ["cpu"]))
    wrapped = offload.wrap(torch.optim.SGD(there, lr=0.1, weight_decay=0.1))
    plain = torch.optim.SGD(here, lr=0.1, weight_decay=0.1, fused=True)
    for turn in range(3):
        for p, q, g in zip(there, here, tensors(turn + 1, torch.float32), strict=True):
            p.grad, q.grad = (g.to(p.device) + p.detach()) * 1, g + q.detach()
        torch.accelerator.synchronize()
        fake.reset_counters()
        wrapped.step()
        counted = fake.counters()
        assert counted["pageable_bytes"] == counted["blocking_copies"] == 0
        plain.step()
    for p, q in zip(there, here, strict=True):
        assert torch.equal(p.detach().cpu(), q.detach())
    assert not offload.report(wrapped).fallbacks and wrapped.state_dict()["state"] == {}
    wrapped.close()


def test_the_report_tells_of_device_copies(fake: DeviceModule, tmp_path: Path) -> None:
    """Gradients that came during backward count for the step behind it."""
    params = on_device(tensors(0, torch.float32), ["fake"])
    optimizer = offload.wrap(torch.optim.AdamW(params, lr=1e-2))
    for _ in range(3):
        sum((p * p).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    told = offload.report(optimizer)
    nbytes = sum(p.nbytes for p in params)
    assert told.last.moved["host_to_device_bytes"] == nbytes
    assert told.last.moved["device_to_host_bytes"] >= 2 * nbytes, "parameters and gradients"
    assert 3 * told.last.moved["device_to_host_bytes"] == told.total.moved["device_to_host_bytes"]
    assert told.plan.predicted_step_s is None and not told.plan.fits_without_us
    told.save_trace(tmp_path / "trace.json")
    assert "copies to the host" in (tmp_path / "trace.json").read_text()
    optimizer.close()
