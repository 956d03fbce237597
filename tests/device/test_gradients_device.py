"""Gradients that come to the host while backward runs: the bits of the host, with any change of
them before the step, under every schedule.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule, load
from fake_accelerator.train_case import SCHEDULES
from support.bits import same_tensors
from support.device.transfer_cases import register
from torch import Tensor, nn

import offload
from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.device.device import Mark
from offload.optim import coordinator, grad_buffers
from offload.optim.grad_buffers import GradBuffer, GradBuffers
from offload.optim.staging import HostSum
from offload.planning import planner

Between = Callable[[nn.Module, int], None]  # what a loop does after backward, and in which step


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 256)
    monkeypatch.setattr(coordinator, "Pool", partial(Pool, register=register))


class Net(nn.Module):
    """A model of which one layer is used twice, one in every other step, one never; some weights
    are tied, one is of another memory format.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(12, 20), nn.Linear(20, 20, bias=False)
        self.odd, self.never = nn.Linear(20, 20), nn.Linear(3, 3)
        self.last = nn.Linear(20, 12, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone().t().t())
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.twice(torch.tanh(self.twice(self.first(x))))
        if step % 2:
            x = self.odd(x)
        return self.last(x) * self.scale


def nothing(model: nn.Module, step: int) -> None:
    pass


def clip(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_behind_the_versions(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.clamp_(-1e-3, 1e-3)


def negate_behind_the_versions(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.neg_()


def replace(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.flip(0) if param.dim() else param.grad * 2


def change_one(model: nn.Module, step: int) -> None:
    if step == 2:
        model.get_parameter("twice.weight").grad.data[3, 4] += 1e-3


def train(
    device: str,
    between: Between = nothing,
    batches: int | list[int] = 1,
    dtype: torch.dtype = torch.float32,
    steps: int = 4,
    set_to_none: bool = True,
    **fields: Any,
) -> tuple[list[Tensor], offload.Report]:
    """Train some steps, of `batches` backward passes each; return parameters and state."""
    torch.manual_seed(3)
    model = Net().to(dtype).to(device)
    data = torch.randn(steps, 3, 5, 12).to(dtype)
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), **fields)
    try:
        for step in range(steps):
            for batch in range(batches[step] if isinstance(batches, list) else batches):
                x = data[step, batch].to(device)
                model(x, step).square().mean().backward()
            between(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        report = offload.report(optimizer)
        state = optimizer.state_dict()["state"]
        fields_of = [v for s in state.values() for v in s.values()]
        return [*(p.detach().cpu() for p in model.parameters()), *fields_of], report
    finally:
        if device != "cpu":
            torch.accelerator.synchronize()
        optimizer.close()


VARIOUS = [1, 3, 2, 1]


@pytest.mark.parametrize(
    ("between", "batches"),
    [
        (nothing, VARIOUS),
        (clip, 1),
        (clip_behind_the_versions, 2),
        (negate_behind_the_versions, 1),
        (replace, VARIOUS),
        (change_one, 1),
        (change_one, VARIOUS),
    ],
)
def test_whatever_happens_before_the_step(
    fake: DeviceModule, between: Between, batches: int | list[int]
) -> None:
    theirs, _ = train("cpu", between, batches)
    ours, report = train("fake", between, batches)
    assert same_tensors(ours, theirs)
    assert report.counts["gradients_early_bytes"] > 0
    if between is not change_one:  # whose gradient comes late in the step of the change, or early
        assert bool(report.fallbacks) is (between is not nothing)


@pytest.mark.parametrize(("dtype", "set_to_none"), [(torch.float32, False), (torch.bfloat16, True)])
def test_zeroed_both_ways(fake: DeviceModule, dtype: torch.dtype, set_to_none: bool) -> None:
    theirs, _ = train("cpu", batches=2, dtype=dtype, set_to_none=set_to_none)
    ours, report = train("fake", batches=2, dtype=dtype, set_to_none=set_to_none)
    assert same_tensors(ours, theirs) and not report.fallbacks


@pytest.mark.parametrize(
    ("batches", "dtype", "on_disk"),
    [(1, torch.float32, True), (3, torch.float32, False), (3, torch.bfloat16, True)],
)
def test_released(
    fake: DeviceModule, tmp_path: Path, batches: int, dtype: torch.dtype, on_disk: bool
) -> None:
    def there_are_none(model: nn.Module, step: int) -> None:
        assert all(p.grad is None for p in model.parameters())

    disk = {"host_memory": 90 << 10, "nvme": tmp_path} if on_disk else {}
    theirs, _ = train("cpu", nothing, batches, dtype)
    ours, report = train("fake", there_are_none, batches, dtype, release_grads=True, **disk)
    assert same_tensors(ours, theirs) and not report.fallbacks
    assert bool(report.plan.disk_bytes) is on_disk
    assert "gradients_late_bytes" not in report.counts


def test_released_and_clipped(fake: DeviceModule) -> None:
    theirs, _ = train("cpu", clip)
    ours, _ = train("fake", max_grad_norm=0.05, release_grads=True, batches=1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def wrapped_layer(**fields: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = nn.Linear(8, 8).to("fake")
    return model, offload.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), **fields)


def test_a_step_moves_only_parameters(fake: DeviceModule) -> None:
    """The gradients are there already, and nothing went through pageable memory."""
    model, optimizer = wrapped_layer()
    x = torch.ones(4, 8, device="fake")
    moved = sum(p.nbytes for p in model.parameters())
    model(x).sum().backward()
    torch.accelerator.synchronize()
    assert fake.counters()["d2h_bytes"] == moved
    fake.reset_counters()
    optimizer.step()
    counted = fake.counters()
    assert counted["pageable_bytes"] == counted["blocking_copies"] == 0
    assert (counted["h2d_bytes"], counted["d2h_bytes"]) == (moved, moved + 2)  # and two verdicts
    optimizer.close()


def test_accumulation_copies_the_last_gradient_only(fake: DeviceModule) -> None:
    model, optimizer = wrapped_layer()
    moved = sum(p.nbytes for p in model.parameters())
    for step in range(3):
        early = offload.report(optimizer).counts.get("gradients_early_bytes", 0)
        for _ in range(4):
            model(torch.ones(4, 8, device="fake")).sum().backward()
        now = offload.report(optimizer).counts["gradients_early_bytes"] - early
        assert now == (moved if step else 4 * moved)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_a_step_keeps_no_gradients(fake: DeviceModule) -> None:
    """Also not while it waits for the next one."""
    model, optimizer = wrapped_layer()
    before = torch.accelerator.memory_allocated()
    for _ in range(2):
        model(torch.ones(4, 8, device="fake")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    offload.report(optimizer)
    for transfer in optimizer._offload_session.coordinator.resources.transfers.values():
        transfer.poll()
    assert torch.accelerator.memory_allocated() == before
    optimizer.close()


@pytest.mark.parametrize("release_grads", [True, False])
def test_released_gradients_leave_the_device(fake: DeviceModule, release_grads: bool) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16))).to("fake")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = offload.wrap(sgd, release_grads=release_grads)
    before = torch.accelerator.memory_allocated()
    model(torch.ones(1, 64, device="fake")).sum().backward()
    torch.accelerator.synchronize()
    optimizer.step()  # sees that the copies are over
    after = torch.accelerator.memory_allocated()
    assert (after - before < 64 * 64 * 4) is release_grads
    optimizer.close()


def test_zero_grad_drops_what_was_released(fake: DeviceModule) -> None:
    model, optimizer = wrapped_layer(release_grads=True)
    before = copy.deepcopy(model).cpu()
    model(torch.ones(4, 8, device="fake")).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach())
    optimizer.close()


def test_released_gradients_are_zeroed_where_that_is_asked_for(fake: DeviceModule) -> None:
    """A zero gradient is one: the parameter is stepped, although backward did not reach it."""
    there, here = (nn.Parameter(torch.ones(300, device=where)) for where in ("fake", "cpu"))
    ours = offload.wrap(torch.optim.AdamW([there], lr=1e-2), release_grads=True)
    theirs = torch.optim.AdamW([here], lr=1e-2, fused=True)
    for param, optimizer in ((there, ours), (here, theirs)):
        for has_backward in (True, False, True):
            if has_backward:
                (param * param).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert torch.equal(there.detach().cpu(), here.detach())
    ours.close()


@pytest.mark.parametrize("values", [(1.0, -1.0), (1.0, -1.0, -1.0, 1.0), (3.0, 1.0, 2.0)])
@pytest.mark.parametrize("change", ["signs", "places"])
def test_changes_that_leave_the_sums_alone_are_seen(
    fake: DeviceModule, values: tuple[float, ...], change: str
) -> None:
    """The gradient of two classes' bias is (a, -a)."""
    factor = torch.tensor(values)
    there, here = (nn.Parameter(torch.ones(len(values), device=d)) for d in ("fake", "cpu"))
    ours = offload.wrap(torch.optim.SGD([there], lr=1e-2))
    theirs = torch.optim.SGD([here], lr=1e-2, fused=True)
    for param, optimizer in ((there, ours), (here, theirs)):
        (param * factor.to(param.device)).sum().backward()
        grad = param.grad
        assert grad is not None
        grad.data = grad.data.neg() if change == "signs" else grad.data.roll(1)
        optimizer.step()
    assert torch.equal(there.detach().cpu(), here.detach())
    assert "gradients while backward runs" in offload.report(ours).fallbacks
    ours.close()


@pytest.mark.parametrize("how", ["close", "add_param_group"])
def test_gradients_come_back_when_the_plan_ends(fake: DeviceModule, how: str) -> None:
    model, optimizer = wrapped_layer(release_grads=True)
    plain = copy.deepcopy(model).cpu()
    model(torch.ones(4, 8, device="fake")).sum().backward()
    plain(torch.ones(4, 8)).sum().backward()
    if how == "close":
        optimizer.close()
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device="fake"))]})
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad.cpu(), q.grad)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9).step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach())
    if how != "close":
        optimizer.close()


def test_a_gradient_that_somebody_sets_wins(fake: DeviceModule) -> None:
    model, optimizer = wrapped_layer(release_grads=True)
    before = model.bias.detach().cpu()
    model(torch.ones(4, 8, device="fake")).sum().backward()
    model.bias.grad = torch.full((8,), 2.0, device="fake")
    optimizer.step()
    assert torch.equal(model.bias.detach().cpu(), before - 0.1 * torch.full((8,), 2.0))
    optimizer.close()


def test_a_refused_step_keeps_what_was_released(fake: DeviceModule) -> None:
    model, optimizer = wrapped_layer(release_grads=True)
    before = model.bias.detach().cpu()
    model(torch.ones(4, 8, device="fake")).sum().backward()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(offload.ConfigError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(model.bias.detach().cpu(), before)
    optimizer.close()


def test_a_forgotten_optimizer_leaves_backward_alone(fake: DeviceModule) -> None:
    model, optimizer = wrapped_layer(release_grads=True)
    del optimizer
    gc.collect()
    model(torch.ones(4, 8, device="fake")).sum().backward()
    assert model.bias.grad is not None


def test_host_parameters_have_nothing_to_release(fake: DeviceModule) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(offload.ConfigError, match="release_grads: all parameters are in host mem"):
        offload.wrap(optimizer, release_grads=True)
    assert type(optimizer) is torch.optim.SGD


def test_strict_says_that_gradients_do_not_come_early(fake: DeviceModule) -> None:
    model, optimizer = wrapped_layer(strict=True)
    model(torch.ones(4, 8, device="fake")).sum().backward()
    clip(model, 0)
    with pytest.raises(offload.StateError, match="max_grad_norm"):
        optimizer.step()
    optimizer.close()


def no_sums(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeros as the sums of any gradient, so that no change shows in them."""
    return (torch.zeros(1, dtype=torch.int64, device=grad.device),) * 2


def never_changed(likeness: Any, grad: Tensor) -> bool:
    return True


def no_ticket(home: HostSum) -> None:
    """Drop the ticket, so that no thread waits for the gradient."""
    home.ticket = None


def no_mark(owner: GradBuffers, home: GradBuffer) -> Mark:
    """Mark an empty stream, so that the copy does not wait for the device's computation."""
    stream = torch.accelerator.current_stream(home.record.device)
    return Mark(stream, torch.Stream(home.record.device).record_event())


def add_nothing(home: HostSum, values: Tensor, begin: int) -> None:
    """Drop the gradient that a later backward pass would add."""


@pytest.mark.parametrize(
    ("owner", "name", "fault", "loop"),
    [
        (grad_buffers, "_sums", no_sums, {"between": clip_behind_the_versions}),
        (grad_buffers._Likeness, "is_of", never_changed, {"between": replace}),
        # Elsewhere a later copy on the same stream is waited for as well.
        (HostSum, "settle", no_ticket, {"release_grads": True, "max_grad_norm": 0.05}),
        (GradBuffers, "_mark", no_mark, {}),
        (HostSum, "add", add_nothing, {"batches": 2, "release_grads": True}),
    ],
    ids=["sums", "version", "ticket", "mark", "add"],
)
def test_every_check_and_wait_is_needed(
    owner: Any, name: str, fault: Any, loop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load()  # before any backward: autograd counts the devices once
    torch.set_num_threads(1)
    right, _ = train("fake", **loop)
    if name == "is_of":  # the sums see almost all that it sees; here it has to do without them
        monkeypatch.setattr(grad_buffers, "_sums", no_sums)

    def is_wrong(schedule: tuple[str, int]) -> bool:
        load(*schedule)
        return not same_tensors(train("fake", **loop)[0], right)

    assert not any(is_wrong(schedule) for schedule in SCHEDULES)
    monkeypatch.setattr(owner, name, fault)
    assert any(is_wrong(schedule) for schedule in SCHEDULES)
