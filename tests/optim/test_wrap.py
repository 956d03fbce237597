"""`offload.wrap`: any training loop, its state in memory or on disk, has the bits of torch."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_model, assert_same_state, bits
from support.covering import covering
from support.loops import chosen
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

import offload
from offload import CapacityError, ConfigError, StateError, StoreError, kernels
from offload.core.budget import Budget
from offload.planning import planner
from offload.storage.engine import Fault, FaultKind

STEPS = chosen(test=14, torture=30)  # states are swapped at 1 or 11


@pytest.fixture(autouse=True)
def nothing_is_left(own_budget: Budget) -> Iterator[None]:
    yield
    gc.collect()
    assert own_budget.used_bytes == 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 4096)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 1024)


class Net(nn.Module):
    """A model with parameters of many sizes and shapes; one is used every third time, one never."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(50, 37)
        self.up, self.down = nn.Linear(37, 150), nn.Linear(150, 37)
        self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(37)
        self.sometimes = nn.Parameter(torch.ones(()))
        self.never = nn.Parameter(torch.ones(9))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.to(dtype)

    def forward(self, words: Tensor, turn: int) -> Tensor:
        x = self.norm(self.down(torch.tanh(self.up(self.embedding(words)))))
        image = self.conv(x.reshape(1, 1, -1, 37))
        loss = x.square().mean() + image.square().mean() + 0 * self.nothing.sum()
        return loss * self.sometimes if turn % 3 == 0 else loss


def words(turn: int) -> Tensor:
    return torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(turn))


# --- parity ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One configuration of the parity test."""

    number: int
    kind: type[Optimizer]
    settings: dict[str, Any]
    groups: int
    budget_share: float | None  # of the state, in host memory; None: all of it
    chunk_numel: int
    threads: int
    accumulate: int
    clip: bool
    schedule: str
    swap_at: int | None  # exchange the states of plain and wrapped before this step


def draw(number: int) -> Draw:
    rng = random.Random(1000 + number)
    kind = rng.choice([AdamW, AdamW, Adam, SGD, Adagrad])
    settings: dict[str, Any] = {
        "lr": rng.choice([1e-3, 1e-2]),
        "weight_decay": rng.choice([0.0, 0.1]),
        "maximize": rng.random() < 0.2,
        "fused": True,
    }
    if kind in (Adam, AdamW):
        settings["betas"] = rng.choice([(0.9, 0.999), (0.4, 0.95)])
        settings["eps"] = rng.choice([1e-8, 1e-4])
        if rng.random() < 0.3:
            settings["lr"] = torch.tensor(settings["lr"])
    if kind is SGD:
        settings["momentum"] = rng.choice([0.0, 0.9])
        settings["nesterov"] = settings["momentum"] > 0 and rng.random() < 0.5
        settings["dampening"] = 0.0 if settings["nesterov"] else rng.choice([0.0, 0.3])
    if kind is Adagrad:
        settings["lr_decay"] = rng.choice([0.0, 0.01])
    return Draw(
        number=number,
        kind=kind,
        settings=settings,
        groups=rng.choice([1, 2, 3]),
        budget_share=rng.choice([None, 0.9, 0.5, 0.3]),
        chunk_numel=rng.choice([1024, 1040, 2048, 4096]),
        threads=rng.choice([1, 2]),
        accumulate=rng.choice([1, 1, 2]),
        clip=rng.random() < 0.5,
        schedule=rng.choice(["none", "before", "after"]),
        swap_at=rng.choice([None, 1, 11]),
    )


def make_optimizer(net: nn.Module, case: Draw) -> Optimizer:
    params = list(net.parameters())
    if case.groups == 1:
        return case.kind(params, **case.settings)
    groups = [{"params": params[i :: case.groups]} for i in range(case.groups)]
    groups[-1]["lr"] = 5e-3
    groups.append({"params": []})
    return case.kind(groups, **case.settings)


def features(case: Draw) -> set[Hashable]:
    kind = case.kind.__name__
    return {
        (kind, "budget", case.budget_share),
        (kind, "swap", case.swap_at),
        (kind, "schedule", case.schedule),
        (kind, "settings", isinstance(case.settings["lr"], Tensor), case.settings["maximize"]),
        *((name, getattr(case, name)) for name in ("groups", "chunk_numel", "accumulate")),
        *((name, getattr(case, name)) for name in ("threads", "clip")),
    }


DRAWN = [draw(number) for number in range(chosen(test=64, torture=640))]
CASES = chosen(test=covering(DRAWN, features), torture=DRAWN, quick=covering(DRAWN, features)[:3])


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
def test_the_bits_are_those_of_torch(
    case: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 parameters and state after some steps are torch's, wherever the state lives."""
    monkeypatch.setattr(planner, "CHUNK_NUMEL", case.chunk_numel)
    kernels.set_num_threads(case.threads)
    nets = Net(), Net()
    optimizers = [make_optimizer(net, case) for net in nets]
    schedulers: list[Any] = []
    if case.schedule == "before":
        schedulers = [CosineAnnealingLR(optimizer, 40) for optimizer in optimizers]
    budget = {}
    if case.budget_share is not None:
        chunks = offload.plan(optimizers[1]).chunks
        share = int(sum(chunk.nbytes for chunk in chunks) * case.budget_share)
        least = 3 * max((chunk.nbytes for chunk in chunks), default=4096)
        budget = {"host_memory": max(share, least), "nvme": tmp_path}
    wrapped = offload.wrap(optimizers[1], **budget)
    assert wrapped is optimizers[1] and isinstance(wrapped, case.kind)
    if case.schedule == "after":
        schedulers = [LinearLR(optimizer, 0.1, 1.0, 25) for optimizer in optimizers]
    for step in range(STEPS):
        if step == case.swap_at:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            optimizers[0].load_state_dict(states[1])
            optimizers[1].load_state_dict(states[0])
        for net, optimizer in zip(nets, optimizers, strict=True):
            for part in range(case.accumulate):
                net(words(step * 7 + part), step).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_model(*nets)
    assert_same_state(*optimizers)
    told = offload.report(wrapped)
    assert told.counts["steps"] == STEPS
    assert (told.disk_written_bytes > 0) == (told.plan.disk_bytes > 0)
    assert told.last.moved["disk_written_bytes"] <= told.plan.disk_bytes
    wrapped.close()
    assert type(wrapped) is case.kind
    assert_same_state(*optimizers)


def test_draws_cover_what_they_should() -> None:
    assert {case.kind for case in CASES} == {AdamW, Adam, SGD, Adagrad}
    assert {case.budget_share for case in CASES} == {None, 0.9, 0.5, 0.3}
    assert {case.swap_at for case in CASES} == {None, 1, 11}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_disk", [False, True])
def test_half_parameters_follow_an_exact_master(
    dtype: torch.dtype, on_disk: bool, tmp_path: Path, small_chunks: None
) -> None:
    """Against torch's fused AdamW on fp32 copies, fed with the same 16-bit gradients."""
    net = Net(dtype)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    options = tight(optimizer, tmp_path) if on_disk else {}
    masters = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    reference = AdamW(masters, lr=1e-2, fused=True)
    offload.wrap(optimizer, **options)
    assert bool(offload.report(optimizer).plan.disk_bytes) is on_disk
    for step in range(STEPS):
        net(words(step), step).backward()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for master, p in zip(masters, net.parameters(), strict=True):
            assert torch.equal(bits(p), bits(master.to(dtype)))
    state = optimizer.state_dict()["state"]
    for number, expected in reference.state_dict()["state"].items():
        assert torch.equal(state[number]["exp_avg_sq"], expected["exp_avg_sq"])
        assert torch.equal(bits(state[number]["master"]), bits(masters[number]))
    optimizer.close()


def test_weights_that_were_loaded_win_over_the_master(small_chunks: None) -> None:
    net, other = Net(torch.bfloat16), Net(torch.bfloat16)
    optimizer = offload.wrap(SGD(net.parameters(), lr=0.5))
    net(words(0), 0).backward()
    optimizer.step()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        other.up.weight.add_(1)
        other.norm.bias.fill_(0.25)
    net.load_state_dict(other.state_dict())
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # with gradients of zero
    assert_same_model(net, other)
    assert not torch.equal(before["up.weight"], net.up.weight)
    net.up.weight.data = before["up.weight"].clone()  # what no version counter sees
    net.up.weight.grad = torch.zeros_like(net.up.weight)
    optimizer.step()
    assert torch.equal(net.up.weight, before["up.weight"])
    optimizer.close()


# --- other optimizers -----------------------------------------------------------------------------

GENERIC: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (AdamW, {"amsgrad": True}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(
    ("kind", "settings"), GENERIC, ids=lambda value: getattr(value, "__name__", "")
)
def test_other_optimizers_of_torch_run_slice_by_slice(
    kind: type[Optimizer], settings: dict[str, Any], tmp_path: Path, small_chunks: None
) -> None:
    nets = Net(), Net()
    plain = kind(nets[0].parameters(), foreach=False, **settings)
    wrapped = kind(nets[1].parameters(), foreach=False, **settings)
    offload.wrap(wrapped, **tight(wrapped, tmp_path))
    assert offload.report(wrapped).plan.disk_bytes
    for step in range(chosen(test=6, torture=12)):
        if step == 3:
            states = copy.deepcopy(plain.state_dict()), copy.deepcopy(wrapped.state_dict())
            plain.load_state_dict(states[1])
            wrapped.load_state_dict(states[0])
        for net, optimizer in zip(nets, (plain, wrapped), strict=True):
            net(words(step), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    wrapped.close()


class SignSgd(Optimizer):
    """A user-defined optimizer that updates each element by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.slope = 2.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad.sign()
                    p.sub_(state["sum"], alpha=group["lr"] * self.slope)


def test_an_optimizer_of_ones_own_needs_a_word(small_chunks: None) -> None:
    nets = Net(), Net()
    plain, own = SignSgd(nets[0].parameters()), SignSgd(nets[1].parameters())
    with pytest.raises(ConfigError, match="elementwise=True"):
        offload.wrap(own)
    offload.wrap(own, elementwise=True)
    for step in range(4):
        for net, optimizer in zip(nets, (plain, own), strict=True):
            net(words(step), step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(*nets)
    own.close()


@pytest.mark.parametrize(
    ("kind", "word"),
    [("LBFGS", "history"), ("Adafactor", "rows and columns"), ("SparseAdam", "sparse")],
)
def test_some_are_refused_by_name(kind: str, word: str) -> None:
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(ConfigError, match=f"{kind} cannot be offloaded.*{word}"):
        offload.wrap(optimizer)
    assert type(optimizer).__name__ == kind


def test_lion_by_itself_and_wrapped(tmp_path: Path, small_chunks: None) -> None:
    nets = Net(), Net()
    plain = offload.Lion(nets[0].parameters(), lr=1e-3, weight_decay=0.1)
    wrapped = offload.Lion(nets[1].parameters(), lr=1e-3, weight_decay=0.1)
    offload.wrap(wrapped, **tight(wrapped, tmp_path))
    for step in range(STEPS):
        for net, optimizer in zip(nets, (plain, wrapped), strict=True):
            net(words(step), step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-3)  # a sign may turn at zero
    wrapped.close()
    with pytest.raises(ConfigError, match="beta1"):
        offload.Lion(nets[0].parameters(), betas=(1.5, 0.9))


# --- the loop -------------------------------------------------------------------------------------


def tight(optimizer: Optimizer, directory: Path) -> dict[str, Any]:
    """Return budgets under which most of the state is on disk."""
    largest = max(chunk.nbytes for chunk in offload.plan(optimizer).chunks)
    return {"host_memory": 3 * largest + 4096, "nvme": directory}


def wrapped_net(**fields: Any) -> tuple[Net, Any]:
    net = Net()
    return net, offload.wrap(AdamW(net.parameters(), lr=1e-2, fused=True), **fields)


def test_fused_clipping_is_near_torchs_own(small_chunks: None) -> None:
    """Bound: the norm is exact where torch's has rounding errors of fp32 sums."""
    nets = Net(), Net()
    plain = AdamW(nets[0].parameters(), lr=1e-2, fused=True)
    wrapped = offload.wrap(AdamW(nets[1].parameters(), lr=1e-2, fused=True), max_grad_norm=0.05)
    assert wrapped.grad_norm is None
    for step in range(10):
        for net in nets:
            net(words(step), step).backward()
        norm = nn.utils.clip_grad_norm_(nets[0].parameters(), 0.05)
        plain.step()
        wrapped.step()
        torch.testing.assert_close(wrapped.grad_norm, float(norm), rtol=1e-6, atol=0)
        for optimizer in (plain, wrapped):
            optimizer.zero_grad()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    wrapped.close()


def test_hooks_closures_and_profiler_ranges() -> None:
    net, optimizer = wrapped_net()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = net(words(1), 1)
        loss.backward()
        return loss

    with torch.profiler.profile() as profile:
        loss = optimizer.step(closure)
    assert loss.requires_grad and seen == ["before", "after"]
    assert any("OffloadAdamW.step" in event.key for event in profile.key_averages())
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2:] == ["saving", "loaded"]
    optimizer.close()


def test_a_scheduler_made_before_keeps_working_after_close() -> None:
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1.0)
    scheduler = LinearLR(optimizer, 0.5, 1.0, 2)
    offload.wrap(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    net(words(0), 0).backward()
    optimizer.step()
    assert optimizer._opt_called
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.75
    assert offload.report(optimizer).counts["steps"] == 1
    optimizer.close()
    assert float(optimizer.state[net.up.weight]["step"]) == 1
    optimizer.step()
    assert float(optimizer.state[net.up.weight]["step"]) == 2


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Adagrad])
def test_a_schedule_may_end_below_zero(kind: type[Optimizer]) -> None:
    """LinearLR to zero misses it by a rounding error; torch looks at the sign only at the start."""
    nets = Net(), Net()
    optimizers = [kind(n.parameters(), lr=1e-2, weight_decay=0.1, fused=True) for n in nets]
    offload.wrap(optimizers[1])
    schedulers = [LinearLR(optimizer, 1 / 3, 0.0, 4) for optimizer in optimizers]
    for step in range(8):
        for net, optimizer, scheduler in zip(nets, optimizers, schedulers, strict=True):
            if step == 6:
                optimizer.param_groups[0]["lr"] = -0.03
            net(words(step), step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step == 4:
            assert -1e-15 < optimizers[1].param_groups[0]["lr"] < 0
    assert_same_model(*nets)
    assert_same_state(*optimizers)
    optimizers[1].close()


def test_a_scaler_skips_steps_with_overflow() -> None:
    net, optimizer = wrapped_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = net.up.weight.detach().clone()
    scaler.scale(net(words(0), 1)).backward()
    net.up.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, net.up.weight) and optimizer.state_dict()["state"] == {}
    assert scaler.get_scale() == 2.0**9
    optimizer.zero_grad()
    scaler.scale(net(words(0), 1)).backward()
    scaler.step(optimizer)
    assert not torch.equal(before, net.up.weight)
    optimizer.close()


def test_groups_can_be_added_and_parameters_thawed(tmp_path: Path, small_chunks: None) -> None:
    nets = Net(), Net()
    optimizers = [AdamW([net.up.weight, net.frozen], lr=1e-2, fused=True) for net in nets]
    offload.wrap(optimizers[1], host_memory=70_000, nvme=tmp_path)
    for step in range(9):
        for net, optimizer in zip(nets, optimizers, strict=True):
            if step == 3:
                optimizer.add_param_group({"params": [net.down.weight], "lr": 1e-3})
            if step == 6:
                net.frozen.requires_grad_(True)
            loss = net(words(step), 1)
            (loss + net.frozen.sum() if step >= 6 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(*nets)
    assert_same_state(*optimizers)
    with pytest.raises(ConfigError, match=r"float32, bfloat16 or float16, got torch.int64"):
        optimizers[1].add_param_group({"params": [torch.zeros(3, dtype=torch.int64)]})
    assert len(optimizers[1].param_groups) == 2
    optimizers[1].close()


def test_a_model_that_is_cast_afterwards_keeps_its_state(small_chunks: None) -> None:
    """`model.bfloat16()` and back: the state goes on, with a master while it is needed."""
    net, optimizer = wrapped_net()
    net(words(0), 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.bfloat16()
    net(words(1), 1).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert "master" in state[4] and float(state[4]["step"]) == 2
    net.float()
    optimizer.zero_grad()
    net(words(2), 1).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert "master" not in state[4] and float(state[4]["step"]) == 3
    weight, net.up.weight.data = net.up.weight.data, torch.zeros(3)
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ConfigError, match=r"expected the shape \(150, 37\)"):
            refused()
    net.up.weight.data = weight
    optimizer.close()


def test_state_before_the_first_step_is_empty_and_existing_state_is_taken_over() -> None:
    _, optimizer = wrapped_net()
    assert optimizer.state_dict()["state"] == {} and not optimizer.state
    optimizer.close()
    nets = Net(), Net()
    optimizers = [AdamW(n.parameters(), lr=1e-2, fused=True) for n in nets]
    for step in range(6):
        for n, o in zip(nets, optimizers, strict=True):
            n(words(step), step).backward()
            o.step()
            o.zero_grad()
        if step == 2:
            offload.wrap(optimizers[1])
            assert len(optimizers[1].state) == 0
    assert_same_model(*nets)
    assert_same_state(*optimizers)
    optimizers[1].close()


def test_state_larger_than_the_budget_is_saved_and_loaded(
    tmp_path: Path, small_chunks: None
) -> None:
    """`torch.save` takes mapped tensors, and a plain optimizer loads them with `weights_only`."""
    net, optimizer = wrapped_net(host_memory=70_000, nvme=tmp_path)
    net(words(0), 0).backward()
    optimizer.step()
    file = tmp_path / "state.pt"
    torch.save(optimizer.state_dict(), file)
    plain = AdamW(Net().parameters(), lr=1e-2, fused=True)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(plain, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    optimizer.close()


# --- what users do to an optimizer and a model after wrapping -----------------------------------


def twins(*sizes: tuple[int, ...], **settings: Any) -> tuple[list[Any], list[Any], Any, Any]:
    """Return the parameters of a plain and of a wrapped AdamW, and both optimizers."""
    sides = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        sides.append([nn.Parameter(torch.randn(size, generator=generator)) for size in sizes])
    plain, wrapped = (AdamW(side, lr=1e-2, fused=True, **settings) for side in sides)
    return sides[0], sides[1], plain, offload.wrap(wrapped)


def step_both(left: list[Any], right: list[Any], *optimizers: Any, turn: int = 0) -> None:
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        generator = torch.Generator().manual_seed(100 * turn + number)
        grad = torch.randn(a.shape, generator=generator)
        a.grad, b.grad = grad.clone(), grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def test_a_group_may_come_as_a_generator() -> None:
    left, right, plain, wrapped = twins((8, 4))
    for side, optimizer in ((left, plain), (right, wrapped)):
        side.append(nn.Parameter(torch.ones(7)))
        optimizer.add_param_group({"params": (p for p in side[1:])})
    assert len(wrapped.param_groups[1]["params"]) == 1
    step_both(left, right, plain, wrapped)
    assert not right[1].eq(1).any()
    wrapped.close()


def test_another_order_of_memory_keeps_the_state() -> None:
    """`model.to(memory_format=torch.channels_last)` between steps gives what no change would.
    (torch's fused kernels go by memory alone and mix up the moments then.)
    """
    left, right, plain, wrapped = twins((4, 4, 5, 5), (6, 4))  # no tail, which is by memory, too
    step_both(left, right, plain, wrapped)
    right[0].data = right[0].data.contiguous(memory_format=torch.channels_last)
    step_both(left, right, plain, wrapped, turn=1)
    for number, state in plain.state_dict()["state"].items():
        ours = wrapped.state_dict()["state"][number]
        assert all(torch.equal(value, ours[name]) for name, value in state.items())
    whole = torch.zeros(6, 8)
    right[1].data = whole[:, :4]
    with pytest.raises(ConfigError, match="next to one another"):
        step_both(left, right, wrapped, turn=2)
    assert whole.eq(0).all()
    right[1].data = left[1].data.clone()
    wrapped.close()


def test_groups_that_are_exchanged_are_seen() -> None:
    left, right, plain, wrapped = twins((8, 4), (5,))
    step_both(left, right, plain, wrapped)
    for optimizer in (plain, wrapped):
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    step_both(left, right, plain, wrapped, turn=1)
    for side, optimizer in ((left, plain), (right, wrapped)):
        side[1] = nn.Parameter(torch.ones(3))
        optimizer.param_groups[0]["params"][1] = side[1]
    step_both(left, right, plain, wrapped, turn=2)
    assert not right[1].eq(1).any()
    wrapped.close()


def test_settings_that_need_other_state_are_refused_in_time() -> None:
    """Settings that come with a state_dict are refused, too, and then nothing has changed."""
    left, right, _, wrapped = twins((8, 4))
    before = right[0].detach().clone()
    wrapped.param_groups[0]["amsgrad"] = True
    right[0].grad = torch.ones(8, 4)
    with pytest.raises(ConfigError, match="max_exp_avg_sq"):
        wrapped.step()
    wrapped.param_groups[0]["amsgrad"] = False
    other = AdamW(left, lr=0.5, amsgrad=True)
    left[0].grad = torch.ones(8, 4)
    other.step()
    with pytest.raises(ConfigError, match="its group in the state_dict needs"):
        wrapped.load_state_dict(other.state_dict())
    assert wrapped.param_groups[0]["lr"] == 1e-2 and torch.equal(before, right[0])
    without = copy.deepcopy(AdamW(left, lr=0.5).state_dict())
    without["state"] = {0: {"exp_avg": torch.ones(8, 4), "exp_avg_sq": torch.ones(8, 4)}}
    with pytest.raises(ConfigError, match="expected a step count"):
        wrapped.load_state_dict(without)
    assert wrapped.param_groups[0]["lr"] == 1e-2
    wrapped.close()


def test_a_norm_that_is_no_number_reaches_everybody() -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer = offload.wrap(SGD(params, lr=1.0), max_grad_norm=1.0)
    params[0].grad, params[1].grad = torch.full((4,), torch.nan), torch.full((4,), 1000.0)
    optimizer.step()
    assert params[1].isnan().all()
    optimizer.close()


def test_adagrad_begins_where_it_is_told() -> None:
    params = [nn.Parameter(torch.ones(9)) for _ in range(2)]
    settings = {"lr": 0.1, "initial_accumulator_value": 0.5, "fused": True}
    plain, wrapped = (Adagrad([p], **settings) for p in params)
    offload.wrap(wrapped)
    later = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    for optimizer, p in zip((plain, wrapped), later, strict=True):
        optimizer.add_param_group({"params": [p]})
        p.grad = torch.full((5,), 0.3)
        optimizer.step()
    assert torch.equal(later[0], later[1])
    assert_same_state_of(plain, wrapped, 1)
    wrapped.close()


def assert_same_state_of(left: Optimizer, right: Optimizer, number: int) -> None:
    for name, value in left.state_dict()["state"][number].items():
        assert torch.equal(value, right.state_dict()["state"][number][name]), name


def test_state_of_a_frozen_parameter_is_loaded_and_goes_on() -> None:
    left, right, plain, wrapped = twins((8, 4), (5,))
    step_both(left, right, plain, wrapped)
    saved = copy.deepcopy(plain.state_dict())
    wrapped.close()
    right[1].requires_grad_(False)
    right[1].grad = None
    again = offload.wrap(AdamW(right, lr=1e-2, fused=True))
    again.load_state_dict(saved)
    assert_same_state_of(plain, again, 1)
    right[1].requires_grad_(True)
    step_both(left, right, plain, again, turn=1)
    again.close()


class Counting(SignSgd):
    """An optimizer that counts its steps in its group, which an update by slices cannot keep."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1
        super().step(closure)


def test_what_would_be_lost_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="keeps something in the optimizer or its groups"):
        offload.wrap(Counting([p]), elementwise=True)
    with pytest.warns(UserWarning, match="duplicate"):
        twice = AdamW([p, p])
    with pytest.raises(ConfigError, match="given twice"):
        offload.wrap(twice)
    optimizer = AdamW([p])
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(ConfigError, match="belongs to no parameter"):
        offload.wrap(optimizer)
    optimizer.state.clear()
    offload.wrap(optimizer)
    optimizer.state[p]["exp_avg"] = torch.zeros(3)
    p.grad = torch.ones(3)
    with pytest.raises(StateError, match="load_state_dict"):
        optimizer.step()
    optimizer.state.clear()
    optimizer.close()


def test_a_group_that_does_not_fit_is_refused_and_nothing_is_lost() -> None:
    params = [nn.Parameter(torch.ones(64, 64))]
    optimizer = offload.wrap(AdamW(params, lr=1e-2, fused=True), host_memory="64KiB")
    params[0].grad = torch.ones(64, 64)
    optimizer.step()
    with pytest.raises(CapacityError, match="host_memory"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(512, 512))]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2
    optimizer.close()


# --- refusals -------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_anything_changes(
    tmp_path: Path, own_budget: Budget
) -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    with pytest.raises(
        CapacityError, match=r"host_memory: the optimizer state needs .* raise host_m"
    ):
        offload.wrap(optimizer, host_memory=4096)
    with pytest.raises(CapacityError, match="the least that works is"):
        offload.wrap(optimizer, host_memory=4096, nvme=tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'host_memory'"):
        offload.wrap(optimizer, host_memroy="1GiB")
    with pytest.raises(ConfigError, match="state_dtype: not built yet"):
        offload.wrap(optimizer, state_dtype="int8")
    with pytest.raises(ConfigError, match=r"expected a torch.optim.Optimizer, got Net"):
        offload.wrap(net)
    with pytest.raises(ConfigError, match="complex64"):
        offload.wrap(AdamW([nn.Parameter(torch.ones(3, dtype=torch.complex64))]))
    with pytest.raises(ConfigError, match="next to one another"):
        offload.wrap(AdamW([nn.Parameter(torch.ones(4, 4)[:, ::2])]))
    with pytest.raises(ConfigError, match="expected a wrapped optimizer"):
        offload.report(optimizer)
    assert type(optimizer) is AdamW and own_budget.used_bytes == 0


class Holder(Optimizer):
    """An optimizer that holds another, as accelerate's `prepare` and Lightning make it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("elementwise", [False, True])
def test_an_optimizer_that_holds_another_is_not_the_one_to_wrap(elementwise: bool) -> None:
    holder = Holder(AdamW(Net().parameters()))
    with pytest.raises(ConfigError, match="Holder holds another one, AdamW; give that one"):
        offload.wrap(holder, elementwise=elementwise)


def test_an_object_that_imitates_the_optimizer_closes_the_real_one(own_budget: Budget) -> None:
    """Lightning's `self.optimizers()` inherits the optimizer's class and has none of its fields."""
    net, optimizer = wrapped_net()
    net(words(0), 0).backward()
    optimizer.step()

    class View(type(optimizer)):
        def __init__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(optimizer, name)

    View().close()
    assert type(optimizer) is AdamW and own_budget.used_bytes == 0
    assert float(optimizer.state[net.up.weight]["step"]) == 1


def test_wrapping_twice_copying_and_pickling_are_refused() -> None:
    _, optimizer = wrapped_net()
    with pytest.raises(ConfigError, match="wrapped already"):
        offload.wrap(optimizer)
    with pytest.raises(StateError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(optimizer)
    with optimizer:
        pass
    assert type(optimizer) is AdamW


def test_a_gradient_that_does_not_fit_changes_nothing() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = offload.wrap(SGD(embedding.parameters(), lr=0.1))
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"gradient is sparse .*\.to_dense"):
        optimizer.step()
    assert torch.equal(before, embedding.weight)
    embedding.weight.grad = None
    embedding.weight.grad_dtype = None
    embedding.weight.grad = torch.ones(10, 4, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"expected a gradient of torch.float32 or .*float64"):
        optimizer.step()
    embedding.weight.grad = torch.ones(10, 4)
    optimizer.step()  # not poisoned
    optimizer.close()


def test_a_hyper_parameter_that_does_not_fit_changes_nothing() -> None:
    net, optimizer = wrapped_net()
    net(words(0), 0).backward()
    before = copy.deepcopy(net.state_dict())
    optimizer.param_groups[0]["betas"] = (1.5, 0.9)
    with pytest.raises(ConfigError, match="beta1"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    optimizer.param_groups[0]["betas"] = (0.9, 0.9)
    optimizer.step()  # not poisoned
    assert float(optimizer.state_dict()["state"][4]["step"]) == 1
    optimizer.close()


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net, optimizer = wrapped_net()
    net(words(0), 0).backward()
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(good)
    bad["state"][0]["exp_avg"] = torch.zeros(3)
    bad["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ConfigError, match=r"expected exp_avg of shape .* got \(3,\)"):
        optimizer.load_state_dict(bad)
    del bad["state"][0]["exp_avg"]
    with pytest.raises(ConfigError, match="got None"):
        optimizer.load_state_dict(bad)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], good["state"][number]["exp_avg"])
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [AdamW, SGD, Adagrad])
def test_the_first_steps_can_be_checked(
    kind: type[Optimizer], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    """Right bits pass; a kernel that goes wrong is caught, but only in the steps asked for."""
    net = Net(dtype)
    optimizer = offload.wrap(kind(net.parameters(), lr=0.1, maximize=True), self_check=3)
    update = kernels.update

    def wrong(rule: Any, param: Tensor, *rest: Any, **options: Any) -> None:
        update(rule, param, *rest, **options)
        if param.numel() > 3:
            param[-2] += 1

    for step in range(5):
        net(words(step), step).backward()
        monkeypatch.setattr(kernels, "update", wrong if step == 3 else update)
        optimizer.step()
    optimizer.close()
    optimizer = offload.wrap(kind(net.parameters(), lr=0.1), self_check=1)
    monkeypatch.setattr(kernels, "update", wrong)
    with pytest.raises(StateError, match=r"self_check: parameter of .* different bits"):
        optimizer.step()
    optimizer.close()


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 3, 7])
@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.FLIP])
def test_a_fault_of_the_disk_poisons_the_optimizer(
    nth: int, kind: FaultKind, tmp_path: Path, small_chunks: None
) -> None:
    """The typed error comes out of `step`; after it nothing mixed can be stepped or saved."""
    net, optimizer = wrapped_net(host_memory=70_000, nvme=tmp_path)
    for step in range(2):
        net(words(step), step).backward()
        optimizer.step()
    optimizer._offload_session.coordinator.store.engine.inject(Fault(kind, nth, True, 5))
    with pytest.raises(StoreError, match="state chunk"):
        for _ in range(3):
            optimizer.step()
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match="different steps; load a checkpoint"):
            refused()
    optimizer.close()
    assert type(optimizer) is AdamW and not optimizer.state


def test_a_close_that_finds_no_room_loses_nothing(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = wrapped_net(host_memory=70_000, nvme=tmp_path)
    net(words(0), 0).backward()
    optimizer.step()

    def full(*_: Any) -> Tensor:
        raise StoreError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("offload.storage.handout.Handout.room", full)
        with pytest.raises(StoreError, match="no room"):
            optimizer.close()
    optimizer.step()
    optimizer.close()
    assert float(optimizer.state[net.up.weight]["step"]) == 2
