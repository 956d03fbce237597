"""Models that are prepared for a device: the bits of the plain model there, under every schedule,
within every budget.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule, load
from fake_accelerator.train_case import SCHEDULES
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from support.bits import assert_same_model
from support.device.prepare_cases import (
    adamw,
    assert_same_bits,
    budget_bytes,
    device_bytes,
    least_host_bytes,
    ready,
)
from support.device.transfer_cases import register
from support.leftovers import await_nothing_held
from support.loops import SEED, chosen, tally
from support.models import MODELS, batch, loss_of, make
from support.training import step
from torch import Tensor, nn

import offload
from offload.core.budget import Budget
from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.pool import Pool
from offload.params import gradients, prepared, units
from offload.params.block import Presence
from offload.params.placeholder import is_offloaded
from offload.params.prepared import prepared_of
from offload.params.residency import Residency
from offload.planning import planner
from offload.planning.unit import UnitSizes

KI = 1 << 10
SOME = [("eager", 0), ("lazy", 0), ("seeded", 5)]
under_some = pytest.mark.parametrize("fake", SOME, ids=["eager", "lazy", "seeded"], indirect=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 256)
    monkeypatch.setattr(prepared, "Pool", partial(Pool, register=register))
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # the fake device has no kernel for it
    yield
    torch.backends.mha.set_fastpath_enabled(True)
    torch.accelerator.synchronize()
    await_nothing_held(own_budget)


BUDGETS = ["one", "some", "all"]
# Every model under every schedule; each of both with every budget. In `make test` every model under
# three, and every schedule with three or four.
PAIRS = [
    pytest.param(
        name,
        schedule,
        BUDGETS[(i + j) % 3],
        id=f"{name}-{'-'.join(map(str, schedule))}",
        marks=[pytest.mark.quick] if i == 0 else [],
    )
    for i, name in enumerate(MODELS)
    for j, schedule in enumerate(SCHEDULES)
    if chosen(test=(j - 3 * i) % len(SCHEDULES) < 3, torture=True)
]


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


# --- what happens on the way ----------------------------------------------------------------------


def on_device(seed: int = 0) -> tuple[nn.Module, Any]:
    """Make a plain model on the device, with a wrapped optimizer."""
    model = make("gpt", seed).to("fake")
    return model, offload.wrap(adamw(model))


def counts_of(model: nn.Module) -> dict[str, int]:
    return dict(prepared_of(model).metrics.snapshot().counts)


@pytest.mark.parametrize("name", chosen(test=["gpt", "around"], torture=[*MODELS]))
def test_evaluation_in_inference_mode_before_and_between_steps(name: str, tmp_path: Path) -> None:
    load("lazy", 0)
    seen = []
    for is_ours in (False, True):
        model = make(name)
        optimizer = adamw(model if is_ours else model.to("fake"))
        if is_ours:
            host_bytes = 2 * least_host_bytes(name, torch.float32)
            offload.prepare(model, optimizer, device="fake", nvme=tmp_path, host_memory=host_bytes)
        else:
            optimizer = offload.wrap(optimizer)
        found = []
        for number in range(3):
            torch.manual_seed(number)
            with torch.inference_mode():
                found.append(model(batch(number).to("fake")).cpu())
            found.append(step(model, optimizer, number, "fake").cpu())
        optimizer.close()
        seen.append([*found, *(param.detach().cpu() for param in model.parameters())])
        del model, optimizer
    assert all(torch.equal(ours, plain) for plain, ours in zip(*seen, strict=True))


@under_some
def test_a_step_with_room_for_all_copies_everything_once_and_never_waits(
    fake: DeviceModule,
) -> None:
    model, optimizer = ready()
    tokens = [batch(seed).to("fake") for seed in range(4)]
    blocks = prepared_of(model).engine.residency.blocks
    for seed in range(3):
        before, host_syncs = counts_of(model), 0
        torch.accelerator.synchronize()
        fake.reset_counters()
        loss = loss_of(model, tokens[seed])
        host_syncs = fake.counters()["host_syncs"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counted, after = fake.counters(), counts_of(model)
        assert counted["pageable_bytes"] == counted["blocking_copies"] == 0
    assert host_syncs == 0  # in the forward pass
    sizes = sum(block.nbytes for block in blocks)
    moved = after["host_to_device_bytes"] - before["host_to_device_bytes"]
    ahead = sum(sorted(block.nbytes for block in blocks)[-2:])  # for the step after it
    assert sizes <= moved <= sizes + ahead
    assert after.get("device_drops") == before.get("device_drops")
    trained = sum(p.numel() * p.element_size() for p in model.parameters())
    assert counted["d2h_bytes"] == trained
    offload.close(model)


def test_both_stages_work_at_once(tmp_path: Path) -> None:
    """Blocks are read from the disk before they are needed, and go to the device before, too."""
    load("eager", 0)
    least, everything, others = device_bytes("gpt", torch.float32)
    host = least_host_bytes("gpt", torch.float32) + 40 * KI
    model, optimizer = ready(
        tmp_path, host_memory=host, device_memory=4 * others + least + everything // 2
    )
    for seed in range(4):
        before = counts_of(model)
        step(model, optimizer, seed, "fake")
    after = counts_of(model)
    found = {name: after[name] - before.get(name, 0) for name in after}
    assert found["disk_read_bytes"] > 0
    assert found.get("device_misses", 0) < found["device_hits"]
    optimizer.close()


def test_a_longer_batch_shrinks_what_is_resident() -> None:
    load("lazy", 0)
    least, everything, others = device_bytes("gpt", torch.float32)
    limit = 5 * others + least + everything
    plain_model, other = on_device()
    model, optimizer = ready(device_memory=limit)
    other_peak = prepared_of(model).engine.residency.tier.device_budget
    for times in (1, 1, 1, 2, 4, 4, 1):
        tokens = torch.cat([batch(times + n) for n in range(times)]).to("fake")
        losses = []
        for one, stepper in ((plain_model, other), (model, optimizer)):
            gc.collect()
            if one is model:
                held = torch.accelerator.memory_allocated()
                torch.accelerator.reset_peak_memory_stats()
            loss = loss_of(one, tokens)
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            losses.append(loss.detach().cpu())
            del loss
        assert torch.equal(*losses)
        plain_bytes = sum(p.nbytes for p in plain_model.parameters())
        assert held and torch.accelerator.max_memory_allocated() - plain_bytes <= limit
    assert other_peak.others_peak_bytes > others
    optimizer.close()
    other.close()
    assert_same_model(model, plain_model)


def test_budgets_that_cannot_work_are_refused_before_anything_is_allocated() -> None:
    load("eager", 0)
    model = make("gpt")
    before = torch.accelerator.memory_allocated()
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(
        CapacityError, match=r"the least that works is about (\d+) bytes"
    ) as refused:
        offload.prepare(model, adamw(model), device="fake", device_memory=5 * KI)
    least = int(str(refused.value).split("about ")[1].split()[0])
    with pytest.raises(CapacityError, match="the least that works"):
        offload.prepare(model, device="fake", device_memory=least - 1)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert torch.accelerator.memory_allocated() == before
    with pytest.raises(ConfigError, match="the CPU has no device memory"):
        offload.prepare(model, device="cpu", device_memory="1GiB")
    offload.prepare(model, device="fake", device_memory=least)
    with pytest.raises(CapacityError, match="activations, gradients and others hold"):
        loss_of(model, batch(0).to("fake"))
    offload.close(model)
    assert_same_model(model, make("gpt"))


def test_auto_is_the_device_that_torch_has() -> None:
    load("eager", 0)
    model = offload.prepare(make("gpt"))
    assert prepared_of(model).prepare_plan.device == torch.device("fake:0")
    assert {p.device for p in model.parameters()} == {torch.device("fake:0")}
    assert model.to("fake") is model
    with pytest.raises(ConfigError, match=r"offload\.close"):
        model.cpu()
    offload.close(model)


def test_a_model_that_is_on_the_device_goes_back_there() -> None:
    load("lazy", 0)
    theirs, other = on_device()
    ours = make("gpt").to("fake")
    mine = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    ours.register_buffer("extra", torch.ones(3))  # on the CPU
    loss_of(ours, batch(9).to("fake")).backward()
    loss_of(theirs, batch(9).to("fake")).backward()
    offload.prepare(ours, mine, device="fake")
    assert all(p.grad.is_cpu for p in ours.parameters())
    assert ours.extra.device.type == "fake"
    for seed in range(3):
        assert step(ours, mine, seed, "fake") == step(theirs, other, seed, "fake")
    loss_of(ours, batch(3).to("fake")).backward()
    loss_of(theirs, batch(3).to("fake")).backward()
    mine.close()
    other.close()
    assert ours.extra.device.type == "cpu"
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.device == p.grad.device == torch.device("fake:0")
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)
        for name, value in other.state[q].items():
            mirrored = mine.state[p][name]
            assert mirrored.device == value.device and torch.equal(mirrored, value)
    del ours._buffers["extra"]
    mine.step()
    other.step()
    assert_same_model(ours, theirs)


def test_parameters_are_guarded_outside_of_runs() -> None:
    load("lazy", 0)
    model, optimizer = ready()
    step(model, optimizer, 0, "fake")
    tier = prepared_of(model).engine.residency.tier
    model(batch(0).to("fake"))
    assert any(block.on_device is Presence.HERE for block in tier._blocks)
    assert all(is_offloaded(p) for p in model.parameters())
    with pytest.raises(StateError, match=r"offload\.resident"):
        model.head.weight.norm()
    copied = counts_of(model)["host_to_device_bytes"]
    model(batch(0).to("fake"))
    assert counts_of(model)["host_to_device_bytes"] == copied  # they were there all the time
    offload.close(model)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda p: p.mul_(1.5),
    "data": lambda p: p.data.mul_(1.5),
    "rebound": lambda p: setattr(p, "data", p.data * 1.5),
}


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("is_tight", [True, False], ids=["tight", "roomy"])
def test_edits_are_kept(how: str, is_tight: bool, tmp_path: Path, own_budget: Budget) -> None:
    load("lazy", 0)
    least = least_host_bytes("gpt", torch.float32)
    theirs, other = on_device()
    host = least + 20 * KI + own_budget.used_bytes
    model, optimizer = ready(tmp_path, **({"host_memory": host} if is_tight else {}))
    for seed in range(3):
        assert step(model, optimizer, seed, "fake") == step(theirs, other, seed, "fake")
        with torch.no_grad(), offload.resident(model.layers[seed]):
            for p, q in zip(
                model.layers[seed].parameters(), theirs.layers[seed].parameters(), strict=True
            ):
                assert p.device.type == "fake" and torch.equal(p, q)
                EDITS[how](p)
                EDITS[how](q)
        with torch.no_grad():
            assert torch.equal(model(batch(9).to("fake")), theirs(batch(9).to("fake")))
    optimizer.close()
    other.close()
    assert_same_model(model, theirs)


def test_what_does_not_fit_the_place_is_refused() -> None:
    load("lazy", 0)
    theirs, other = on_device()
    model, optimizer = ready()
    weight = model.layers[1].up.weight
    with offload.resident(model.layers[1]):
        kept = weight.data.clone()
    words = r"expected torch.float32 .* got torch.bfloat16 .*fake"
    with pytest.raises(StateError, match=words), offload.resident(model.layers[1]):
        weight.data = weight.data.bfloat16()
    weight.data = kept
    assert step(model, optimizer, 0, "fake") == step(theirs, other, 0, "fake")
    optimizer.close()
    other.close()
    assert_same_model(model, theirs)


def test_a_look_changes_nothing() -> None:
    """Exposing the parameters changes nothing, also between forward and backward."""
    load("lazy", 0)
    theirs, other = on_device()
    model, optimizer = ready()
    losses = [loss_of(one, batch(1).to("fake")) for one in (model, theirs)]
    with offload.resident(model):
        assert model.norm.weight.norm() == theirs.norm.weight.norm()
    for loss in losses:
        loss.backward()
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.cpu())
    with torch.no_grad(), offload.resident(model.norm):
        model.norm.weight.mul_(2.0)
        theirs.norm.weight.mul_(2.0)
        assert model.norm.weight.grad.device.type == "fake"
        model.norm.weight.grad.add_(1.0)
        model.norm.bias.grad = None
    theirs.norm.weight.grad.add_(1.0)
    theirs.norm.bias.grad = None
    optimizer.step()
    other.step()
    optimizer.close()
    other.close()
    assert_same_model(model, theirs)


def test_state_dicts_go_out_and_in(tmp_path: Path) -> None:
    load("lazy", 0)
    theirs, other = on_device(seed=3)
    model, optimizer = ready(tmp_path)
    step(theirs, other, 5, "fake")
    step(model, optimizer, 4, "fake")
    loss = loss_of(model, batch(1).to("fake"))
    model.load_state_dict(theirs.state_dict())
    with pytest.raises(StateError, match="have changed since the forward pass"):
        loss.backward()
    model.zero_grad()
    optimizer.load_state_dict(other.state_dict())
    saved = model.state_dict()
    assert saved["head.weight"] is saved["embedding.weight"] and saved["norm.bias"].is_cpu
    assert_same_model(model, theirs)
    before = {name: value.clone() for name, value in saved.items()}
    assert step(model, optimizer, 6, "fake") == step(theirs, other, 6, "fake")
    assert all(torch.equal(saved[name], before[name]) for name in before), "copies"
    optimizer.close()
    other.close()
    assert_same_model(model, theirs)


@under_some
def test_gradients_add_up_as_on_the_device(fake: DeviceModule) -> None:
    """Two forward passes in one backward pass, over a weight that is used twice in each, on top of
    an earlier gradient; zeroed in place; held by user code; set by user code.
    """
    theirs, other = on_device()
    model, optimizer = ready()
    held = []
    for one, stepper in ((theirs, other), (model, optimizer)):
        mine: list[Tensor] = []
        for seed in range(3):
            loss = loss_of(one, batch(seed).to("fake")) + loss_of(one, batch(seed + 5).to("fake"))
            loss.backward()
            if seed == 1:
                one.norm.weight.grad = torch.full_like(one.norm.weight.grad, 0.1)
        mine += [p.grad for p in one.parameters()]
        one.zero_grad()
        loss_of(one, batch(7).to("fake")).backward()  # the places are not free
        mine += [p.grad for p in one.parameters()]
        stepper.step()
        stepper.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in one.parameters())
        mine = [grad.clone() for grad in mine[: len(mine) // 2]]
        step(one, stepper, 8, "fake")
        held.append([grad.cpu() for grad in mine])
    for a, b in zip(*held, strict=True):
        assert torch.equal(a, b)
    assert counts_of(model)["gradients_outside_of_their_place"] > 0
    optimizer.close()
    other.close()
    assert_same_model(model, theirs)


def test_large_gradients_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "STAGING_MOST_BYTES", 1024)
    load("lazy", 0)
    theirs, other = on_device()
    model, optimizer = ready()
    for one in (theirs, model):
        for seed in range(3):
            loss_of(one, batch(seed).to("fake")).backward()
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert p.grad.is_cpu and torch.equal(p.grad, q.grad.cpu())
    optimizer.close()
    other.close()


@under_some
def test_a_view_that_escapes_is_not_pulled_away(fake: DeviceModule) -> None:
    least, _, others = device_bytes("gpt", torch.float32)
    model, optimizer = ready(device_memory=3 * others + 2 * least)
    kept: list[Tensor] = []
    with torch.no_grad():
        hook = model.layers[0].register_forward_hook(
            lambda module, *_: kept.append(module.up.weight.t().detach())
        )
        model(batch(0).to("fake"))
        hook.remove()
        before = kept[0].cpu()
        for seed in range(4):
            model(batch(seed).to("fake"))
        assert torch.equal(kept[0].cpu(), before)
        kept.clear()
    step(model, optimizer, 0, "fake")
    offload.close(model)


@under_some
def test_an_exception_leaves_everything_consistent(fake: DeviceModule) -> None:
    theirs, other = on_device()
    model, optimizer = ready()

    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    for name in ("layers.2", "layers.1.up"):
        handle = model.get_submodule(name).register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            loss_of(model, batch(0).to("fake"))
        handle.remove()
        assert all(is_offloaded(p) for p in model.parameters())
    loss = loss_of(model, batch(0).to("fake"))
    hook = model.layers[1].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward()
    hook.remove()
    model.zero_grad()
    del loss
    for seed in range(2):
        assert step(model, optimizer, seed, "fake") == step(theirs, other, seed, "fake")
    blocks = prepared_of(model).engine.residency.blocks
    assert not any(block.device_pins or block.pins for block in blocks)
    optimizer.close()
    other.close()
    assert_same_model(model, theirs)


def test_two_models_make_room_for_each_other(tmp_path: Path) -> None:
    load("lazy", 0)
    least, everything, others = device_bytes("gpt", torch.float32)
    limit = 5 * others + least + everything
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    policy, optimizer = ready(device_memory=limit)
    fixed = make("gpt").requires_grad_(False)
    offload.prepare(fixed, device="fake", device_memory=limit)
    losses = []
    for seed in range(4):
        tokens = batch(seed).to("fake")
        with torch.no_grad():
            wanted = fixed(tokens)
        loss = (policy(tokens) - wanted).square().mean() + loss_of(policy, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss, wanted
    assert torch.accelerator.max_memory_allocated() <= limit
    offload.close(fixed)
    offload.close(policy)
    theirs, other = on_device()
    fixed.to("fake")
    for seed in range(4):
        tokens = batch(seed).to("fake")
        with torch.no_grad():
            wanted = fixed(tokens)
        loss = (theirs(tokens) - wanted).square().mean() + loss_of(theirs, tokens)
        loss.backward()
        other.step()
        other.zero_grad()
        assert losses[seed] == float(loss.detach())
    other.close()
    assert_same_model(policy, theirs)


def test_create_graph_is_refused() -> None:
    load("eager", 0)
    model, _ = ready()
    with pytest.raises(StateError, match=r"create_graph=True"):
        loss_of(model, batch(0).to("fake")).backward(create_graph=True)
    model.zero_grad()
    offload.close(model)


class Small(nn.Module):
    """A model of layers whose 16-bit kernels the fake device has; some weights are frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.to(dtype)
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_other_optimizers_types_and_frozen_weights(
    dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    """With clipping inside of the update, where there is some."""
    load("lazy", 0)
    ours, theirs = Small(dtype), Small(dtype).to("fake")
    mine, other = (
        OPTIMIZERS[kind]([p for p in one.parameters() if p.requires_grad]) for one in (ours, theirs)
    )
    options = {} if kind == "rmsprop" else {"max_grad_norm": 100.0}
    offload.wrap(other, **options)
    offload.prepare(ours, mine, device="fake", nvme=tmp_path, **options)
    for seed in range(3):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)).to(dtype).to("fake")
        for one, stepper in ((ours, mine), (theirs, other)):
            (one(x).float() - 1).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    mine.close()
    other.close()
    assert_same_model(ours, theirs)


ACTS = st.sampled_from(["train", "forward", "backward", "evaluate", "fail", "layer", "touch"])


@seeded(SEED)
@settings(max_examples=chosen(test=12, torture=600), suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["gpt", "branches", "experts", "thrice", "around", "inside_reentrant"]),
    schedule=st.sampled_from(SCHEDULES),
    depth=st.integers(0, 3),
    is_tight=st.booleans(),
    acts=st.lists(ACTS, min_size=3, max_size=9),
)
def test_any_order(
    name: str, schedule: tuple[str, int], depth: int, is_tight: bool, acts: list[str]
) -> None:
    tally("hypothesis examples")
    least, everything, others = device_bytes(name, torch.float32)
    load(*schedule)
    plain, ours = make(name).to("fake"), make(name)
    waiting: list[list[Tensor]] = []
    room = torch.accelerator.memory_allocated() + (len(acts) + 2) * others + least
    limit = room + (0 if is_tight else everything)
    offload.prepare(ours, device="fake", device_memory=limit, prefetch_depth=depth)
    for number, act in enumerate(acts):
        tokens = batch(number).to("fake")
        if act in ("train", "forward"):
            waiting.append([loss_of(model, tokens) for model in (plain, ours)])
            assert torch.equal(*waiting[-1])
        if act in ("train", "backward") and waiting:
            for loss in waiting.pop():
                loss.backward()
        if act == "evaluate":
            with torch.no_grad():
                if name == "branches":
                    ours.draw.set_state(plain.draw.get_state())
                assert torch.equal(plain(tokens), ours(tokens))
        if act == "fail":
            with pytest.raises((IndexError, RuntimeError)):
                ours(tokens.float())
        if act == "layer":
            x = torch.ones(1, 2, 16, requires_grad=True, device="fake")
            first = "experts" if name == "experts" else "layers"
            for model in (plain, ours):
                getattr(model, first)[1](x).sum().backward()
        if act == "touch":
            with pytest.raises(StateError):
                next(ours.parameters()).sum()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
            assert p.grad is None or torch.equal(p.grad.cpu(), q.grad)
    blocks = prepared_of(ours).engine.residency.blocks
    assert not any(block.device_pins or block.pins or block.is_attached for block in blocks)
    waiting.clear()
    offload.close(ours)
    assert_same_model(ours, plain)


@pytest.mark.parametrize("unscales", [True, False])
def test_a_grad_scaler_is_refused(unscales: bool) -> None:
    """torch copies the scale to where gradients are, and does not wait for it."""
    load("lazy", 0)
    model, optimizer = ready()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = torch.amp.GradScaler("fake", init_scale=64.0)
    scaler.scale(loss_of(model, batch(0).to("fake"))).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(StateError, match="GradScaler: cannot be used"):
        scaler.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    step(model, optimizer, 1, "fake")
    optimizer.close()
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_a_failure_on_the_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    load("lazy", 0)
    begin, calls = Residency.take_in, []

    def fail_third(residency: Residency, block: Any) -> None:
        calls.append(block)
        if len(calls) == 3:
            raise OSError("the third")
        begin(residency, block)

    gc.collect()
    before = torch.accelerator.memory_allocated()
    for where in ("cpu", "fake"):
        model, same = make("pictures").to(where), make("pictures")
        loss_of(model, batch(0).to(where)).backward()
        grads = [p.grad.cpu().clone() for p in model.parameters()]
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "take_in", fail_third)
            with pytest.raises(OSError, match="the third"):
                offload.prepare(model, adamw(model), device="fake")
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {where}
        for p, q, grad in zip(model.parameters(), same.parameters(), grads, strict=True):
            assert torch.equal(p.detach().cpu(), q.detach()) and torch.equal(p.grad.cpu(), grad)
        loss_of(model, batch(0).to(where)).backward()
        calls.clear()
        del model, p
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6)))


def run_batches(model: nn.Module, optimizer: Any, sizes: list[int]) -> list[float]:
    losses = []
    for size in sizes:
        loss = model(torch.ones(size, 64, device="fake")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach().cpu()))
    return losses


@pytest.mark.parametrize("sizes", [[8, 8, 64, 8], [8, 8, 300, 8]])
def test_a_batch_that_is_many_times_longer_still_fits(sizes: list[int]) -> None:
    """The device has no byte more than is allowed, and nothing of that size was seen before."""
    load("eager", 0)
    model = wide()
    optimizer = adamw(model)
    offload.prepare(model, optimizer, device="fake")
    expected = run_batches(model, optimizer, sizes)
    made = prepared_of(model)
    others = made.engine.residency.tier.device_budget.others_peak_bytes
    limit = others + 2 * UnitSizes.of(made.units).least_device_bytes  # of six units
    optimizer.close()
    gc.collect()
    torch.accelerator.empty_cache()
    model = wide()
    optimizer = adamw(model)
    torch.fake.set_budget(limit)  # type: ignore[attr-defined]
    try:
        offload.prepare(model, optimizer, device="fake", device_memory=limit)
        torch.accelerator.reset_peak_memory_stats()
        assert run_batches(model, optimizer, sizes) == expected
        assert torch.accelerator.max_memory_allocated() <= limit
    finally:
        torch.fake.set_budget(1 << 30)  # type: ignore[attr-defined]
        offload.close(model)


@under_some
def test_lending_ends_for_all_when_one_cannot_be_taken_back(fake: DeviceModule) -> None:
    """The others are placeholders outside of runs, so that user code cannot change a copy."""
    model, optimizer = ready()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    params = dict(model.named_parameters())
    wrong = params["layers.0.up.weight"]
    shape = wrong.shape
    with pytest.raises(StateError, match="convert the values"), offload.resident(model):
        wrong.data = torch.zeros(3, 3, device="fake")
    seen = [name for name, param in params.items() if not is_offloaded(param)]
    assert seen and all(name.startswith("layers.0.") for name in seen), "until that is mended"
    wrong.data = before["layers.0.up.weight"].view(shape).to("fake")
    with torch.no_grad():
        model(batch(0).to("fake"))
    assert all(map(is_offloaded, params.values()))
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    optimizer.close()
