"""The progress line of training on a device: its bytes are told, and it is not waited for."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_accelerator import DeviceModule, load
from support.device.transfer_cases import register
from support.models import make
from support.training import step

import offload
from offload.core.budget import Budget
from offload.core.config import format_size
from offload.core.pool import Pool
from offload.integrations import progress_line, screen
from offload.optim import coordinator
from offload.planning import planner


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 1024)
    monkeypatch.setattr(coordinator, "Pool", partial(Pool, register=register))


def test_bytes_on_the_device_are_told(tmp_path: Path) -> None:
    load("eager", 0)
    for kind in ("wrap", "prepare"):
        model, out = make("gpt"), io.StringIO()
        if kind == "wrap":
            optimizer = offload.wrap(torch.optim.AdamW(model.to("fake").parameters()))
        else:
            optimizer = torch.optim.AdamW(model.parameters())
            offload.prepare(model, optimizer, device="fake", nvme=tmp_path)
        for seed in offload.progress(range(3), optimizer, file=out):
            step(model, optimizer, seed, "fake")
        last = out.getvalue().splitlines()[-1]
        assert "| device " in last and ", host " in last and ", disk " in last, kind
        if kind == "wrap":  # looked at for the line
            used = format_size(torch.accelerator.memory_allocated("fake"))
            assert f"| device {used}, host " in last
        offload.close(model)
        offload.close(optimizer)


def test_a_loss_on_the_device_is_waited_for_only_when_a_line_is_due(
    fake: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: now_s[0])})
    for module in (progress_line, screen):
        monkeypatch.setattr(module, "time", clock)
    out, loss = io.StringIO(), torch.ones((), device="fake")
    bar = offload.progress(range(25), None, file=out)
    waited_after = []
    for done in bar:
        if done and fake.counters()["host_syncs"]:
            waited_after.append(done)
        torch.accelerator.synchronize()
        fake.reset_counters()
        bar.set(loss=loss * 2)
        now_s[0] += 1.0
    assert waited_after == [1, 11, 21]
    assert [line.split(" | ")[1] for line in out.getvalue().splitlines()] == ["loss 2"] * 4
