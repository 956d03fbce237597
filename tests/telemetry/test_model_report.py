"""What a report says of a prepared model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import batch, loss_of, make
from torch import nn

import offload
from offload.params import units
from offload.planning.unit import ALIGN_BYTES
from offload.telemetry.figures import key_figures

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)


def trained(folder: Path, steps: int) -> tuple[nn.Module, Any]:
    model = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload.prepare(model, optimizer, host_memory=140 << 10, nvme=folder)
    for seed in range(steps):
        loss_of(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_the_report_of_a_prepared_model(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, 4)
    told = offload.report(model)
    assert told.model == offload.report(optimizer).model is not None
    use = told.model
    assert use.hits + use.misses > 0
    sizes = [p.nbytes for p in set(model.parameters())]
    assert use.param_bytes == sum(-(-nbytes // ALIGN_BYTES) * ALIGN_BYTES for nbytes in sizes)
    assert 0 < use.held_bytes <= use.memory_bytes < use.param_bytes + 7 * 4096
    assert use.host_bytes == sum(use.shares.parts.values()) <= 140 << 10
    away = use.param_bytes - use.held_bytes
    assert use.disk_bytes >= away + told.plan.disk_bytes > 0 and use.activations is None
    assert told.steps == 4 and told.disk_read_bytes > 0
    flat = told.to_dict()
    assert flat["model/hits"] == use.hits and flat["model/prefetch_depth"] == use.depth
    assert flat["host_bytes"] == use.host_bytes and "model/activations/hits" not in flat
    assert flat["disk_bytes"] == told.disk_bytes == use.disk_bytes
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat
    assert "units ahead" in str(told) and "an iteration" in str(told)
    assert re.search(rf"^host memory, taken +{use.shares.taken}$", str(told), re.M)
    assert "disk, in use" in str(told) and not re.search("^activations", str(told), re.M)
    offload.close(model)


def test_the_order_of_units_outlives_the_model(tmp_path: Path) -> None:
    """A new process knows from the first use on what comes next."""
    path = tmp_path / "order.json"
    model, optimizer = trained(tmp_path, 3)
    offload.report(optimizer).trace.save(path)
    offload.close(model)
    again = make("gpt")
    mine = torch.optim.AdamW(again.parameters(), lr=1e-2)
    offload.prepare(again, mine, host_memory=140 << 10, nvme=tmp_path)
    trace = offload.report(again).trace
    trace.load(path)
    loss_of(again, batch(0)).backward()
    assert trace.hits > 0 == trace.misses
    mine.step()
    offload.close(again)
    other = make("encoder")
    offload.prepare(other, nvme=tmp_path)
    with pytest.raises(offload.FormatError, match="was recorded for a model"):
        offload.report(other).trace.load(path)
    offload.close(other)
    plain = offload.wrap(torch.optim.AdamW(make("gpt").parameters()))
    assert offload.report(plain).trace is None
    plain.close()


def test_the_report_of_a_model_alone(tmp_path: Path) -> None:
    model = make("gpt").requires_grad_(False)
    offload.prepare(model, host_memory=32 << 10, nvme=tmp_path)
    for seed in range(3):
        model(batch(seed))
    told = offload.report(model)
    assert told.model is not None and told.model.misses > 0
    assert told.steps == 0 and told.disk_read_bytes > 0 and "units ahead" in str(told)
    named = [figure.name for figure in key_figures(told.run_facts)]
    assert named == ["host memory", "prefetch hits"], "there are no iterations"
    json.dumps(told.to_dict(), allow_nan=False)
    offload.close(model)
    with pytest.raises(offload.ConfigError, match="expected a wrapped optimizer or a prepared"):
        offload.report(model)
