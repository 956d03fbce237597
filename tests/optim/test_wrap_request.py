"""What `wrap` and `plan` refuse, alike and in time; and how optimizers share one budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_tensors
from support.wrapping import adamw, parameters, train
from torch import nn
from torch.optim import AdamW, Optimizer

import offload
from offload import CapacityError, ConfigError
from offload.core.budget import Budget
from offload.optim import coordinator as ground_module
from offload.planning import planner

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_is_left(own_budget: Budget, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 1024)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 1024)
    yield
    gc.collect()
    assert own_budget.used_bytes == 0


# --- the same refusals ----------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"state_dtype": "int8"}, ConfigError, "state_dtype: not built yet"),
    ({"prefetch_depth": 3}, ConfigError, "prefetch_depth: not built yet"),
    ({"nvme": "nowhere/at/all"}, ConfigError, "nvme: nowhere/at/all is not a directory; make it"),
    ({"device": "cuda"}, ConfigError, r"device: cuda was given, .* is on cpu"),
    ({"device": "cpu:1"}, ConfigError, "device: cpu:1 was given"),
    ({"host_memory": 5000}, CapacityError, r"needs 32 KiB \(32768 bytes\), 4.883 KiB are allowed;"),
]


@pytest.mark.parametrize("call", [offload.plan, offload.wrap], ids=["plan", "wrap"])
@pytest.mark.parametrize(("fields", "error", "words"), REFUSED, ids=lambda value: str(value)[:24])
def test_plan_and_wrap_refuse_the_same(
    call: Any, fields: dict[str, Any], error: type[Exception], words: str, own_budget: Budget
) -> None:
    optimizer = AdamW(parameters())
    with pytest.raises(error, match=words):
        call(optimizer, **fields)
    assert type(optimizer) is AdamW and own_budget.limit_bytes is None


@pytest.mark.parametrize("call", [offload.plan, offload.wrap], ids=["plan", "wrap"])
def test_state_that_does_not_fit_is_refused_by_both(call: Any) -> None:
    params = parameters()
    optimizer = AdamW(params)
    optimizer.state[params[0]] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"expected exp_avg of shape \(70, 30\), got \(3,\)"):
        call(optimizer)
    optimizer.state.clear()
    optimizer.state["everybody"] = {}
    with pytest.raises(ConfigError, match="belongs to no parameter"):
        call(optimizer)


def test_a_directory_must_take_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        offload.wrap(AdamW(parameters()), nvme=file)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=r"cannot be written to; allow it"):
        offload.plan(AdamW(parameters()), nvme=tmp_path)


def test_the_device_may_be_named_where_parameters_are_there() -> None:
    assert offload.plan(AdamW(parameters()), device="cpu").numel == 3726
    offload.wrap(AdamW(parameters()), device="cpu").close()


# --- one limit for all ----------------------------------------------------------------------------


def test_a_wrap_that_is_refused_leaves_the_limit(
    tmp_path: Path, own_budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan refuses it, or opening the files does."""
    first = offload.wrap(AdamW(parameters()), host_memory="64KiB")

    def no_room(*_: Any, **__: Any) -> Any:
        raise CapacityError("no room")

    monkeypatch.setattr(ground_module, "DiskStore", no_room)
    with pytest.raises(CapacityError, match="are allowed"):
        offload.wrap(AdamW(parameters()), host_memory="48KiB")
    assert own_budget.limit_bytes == 64 << 10
    with pytest.raises(CapacityError, match="no room"):
        offload.wrap(AdamW(parameters()), host_memory="60KiB", nvme=tmp_path)
    assert own_budget.limit_bytes == 64 << 10
    first.close()


def test_a_second_optimizer_is_told_what_the_first_one_holds(
    tmp_path: Path, own_budget: Budget
) -> None:
    first = offload.wrap(AdamW(parameters()), host_memory="48KiB")
    second = AdamW(parameters())
    for fields in ({}, {"host_memory": "48KiB"}):  # the limit that stands counts as well
        with pytest.raises(
            CapacityError,
            match=r"needs 32 KiB \(32768 bytes\), 16 KiB are allowed \(48 KiB for the whole "
            r"process, of which other optimizers hold 32 KiB; close\(\)",
        ):
            offload.wrap(second, **fields)
    assert offload.plan(second, nvme=tmp_path).host_memory_bytes == 16 << 10
    with pytest.raises(CapacityError, match=r"8 KiB \(8192 bytes\) \(40 KiB for the whole .*least"):
        offload.wrap(second, nvme=tmp_path, host_memory="40KiB")
    offload.wrap(second, nvme=tmp_path)
    assert offload.report(second).plan.arena_bytes <= 16 << 10
    assert own_budget.used_bytes <= 48 << 10
    first.close()
    second.close()
    third = offload.wrap(AdamW(parameters()))  # no optimizer is open: the limit has ended
    assert own_budget.limit_bytes is None
    third.close()


def test_another_plan_later_on_keeps_to_what_others_have_left() -> None:
    """The first optimizer was granted the whole budget when it was alone."""
    params = parameters()
    first = offload.wrap(AdamW(params, lr=1e-2, fused=True), host_memory="80KiB")
    second = offload.wrap(AdamW(parameters()), host_memory="80KiB")
    train(params, first, 0)
    with pytest.raises(CapacityError, match=r"48 KiB are allowed \(80 KiB for the whole process"):
        first.add_param_group({"params": [nn.Parameter(torch.ones(64, 64))]})
    others = parameters()
    plain = AdamW(others, lr=1e-2, fused=True)
    train(others, plain, 0, 1)
    train(params, first, 1)
    assert_same_tensors(params, others)
    first.close()
    second.close()


# --- the report -----------------------------------------------------------------------------------


class Holder(Optimizer):
    """An optimizer that holds another, as accelerate's `prepare` makes it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_a_report_looks_inside() -> None:
    params = parameters()
    optimizer = adamw(params)
    train(params, optimizer, 0)
    assert offload.report(Holder(Holder(optimizer))).counts["steps"] == 1
    optimizer.close()
    for other in (Holder(optimizer), nn.Linear(1, 1), None):
        with pytest.raises(ConfigError, match=f"expected a wrapped .* got {type(other).__name__}"):
            offload.report(other)


def test_totals_go_on_when_the_plan_is_made_anew(tmp_path: Path) -> None:
    params = parameters()
    optimizer = adamw(params, tmp_path)
    train(params, optimizer, 0, 1)
    before = offload.report(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
    after = offload.report(optimizer)
    assert after.counts["steps"] == 2
    assert after.disk_written_bytes >= before.disk_written_bytes + after.plan.step_written_bytes
    kept_aside = sum(2 * 4 * param.numel() for param in params)  # and read from there
    expected = before.disk_read_bytes + before.plan.step_read_bytes + kept_aside
    assert after.disk_read_bytes == expected
    train(params, optimizer, 2)
    last = offload.report(optimizer)
    assert (
        last.disk_written_bytes == after.disk_written_bytes + last.last.moved["disk_written_bytes"]
    )
    optimizer.close()
