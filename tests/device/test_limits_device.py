"""A device that is fuller, smaller or used by more than its user thought."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule, load
from support.bits import assert_same_tensors
from support.device.prepare_cases import adamw
from support.device.transfer_cases import register
from support.models import batch, loss_of, make
from torch import Tensor, nn

import offload
from offload.core.budget import Budget
from offload.core.errors import CapacityError, ConfigError
from offload.core.pool import Pool
from offload.device.accelerator import find_device, used_bytes
from offload.device.device import DeviceTransfer
from offload.optim import coordinator
from offload.params import prepared, units
from offload.params.prepared import prepared_of
from offload.planning.unit import on_device_bytes

WIDTH, LAYERS = 64, 12
LAYER_BYTES = 4 * WIDTH * WIDTH
PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    for module in (prepared, coordinator):
        monkeypatch.setattr(module, "Pool", partial(Pool, register=register))
    load("eager", 0)
    gc.collect()
    torch.accelerator.empty_cache()
    yield
    torch.fake.set_budget(PLENTY)  # type: ignore[attr-defined]
    torch.accelerator.synchronize()


class Layer(nn.Module):
    """A layer that saves nothing for backward of a size comparable to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def deep(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def some() -> Tensor:
    return torch.ones(2, WIDTH, device="fake")


def notes_of(model: nn.Module) -> dict[str, str]:
    return dict(prepared_of(model).metrics.snapshot().fallbacks)


# --- autocast -------------------------------------------------------------------------------------


def peak_under_autocast(act: Any) -> int:
    """Return the peak of bytes on the device beyond those at the start."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with torch.autocast("fake", dtype=torch.bfloat16):
        act()
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.parametrize("how", ["evaluation", "recompute", "an error", "backward inside"])
def test_autocast_keeps_the_casts_of_one_unit(how: str) -> None:
    """Their weights are fp32: torch would keep a copy of the whole model, in 16 bits."""
    model = deep()
    recompute = {"activations": "recompute"} if how in ("recompute", "backward inside") else {}
    offload.prepare(model, adamw(model), device="fake", device_memory=4 * LAYER_BYTES, **recompute)

    def act() -> None:
        if how == "evaluation":
            with torch.no_grad():
                model(some())
        elif how == "an error":
            hook = model[6].register_forward_hook(fail)
            with torch.no_grad():
                with pytest.raises(ArithmeticError):
                    model(some())
                hook.remove()
                model(some())
        else:
            loss = model(some()).sum()
            if how == "backward inside":
                loss.backward()

    for _ in range(2):
        peak = peak_under_autocast(act)
    assert peak <= 4 * LAYER_BYTES, "the casts of all take 6"
    assert not notes_of(model)
    offload.close(model)


def fail(*_: object) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", ["gpt", "repeated"])
def test_the_bits_under_autocast_are_those_of_the_plain_model(name: str, activations: str) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        seen = []
        for seed in range(2):
            with torch.autocast("fake", dtype=torch.bfloat16):
                out = model(batch(seed).to("fake")) if name == "gpt" else model(some())
            loss = out.float().square().mean()
            loss.backward()
            seen.append(loss.detach().cpu())
        return seen + [p.grad.cpu() for p in model.parameters()]

    def fresh() -> nn.Module:
        return make("gpt") if name == "gpt" else Repeated()

    expected = run(fresh().to("fake"))
    model = fresh()
    offload.prepare(model, adamw(model), device="fake", activations=activations)
    assert_same_tensors(run(model), expected)
    assert not notes_of(model)
    offload.close(model)


class Repeated(nn.Module):
    """One layer three times in a row, as in ALBERT: their gradients are summed in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 0, 0, 1):
            x = torch.tanh(self.layers[number](x))
        return x


def test_a_unit_that_comes_again_later_under_autocast_is_told() -> None:
    model = make("thrice")
    offload.prepare(model, adamw(model), device="fake", activations="recompute")
    with torch.autocast("fake", dtype=torch.bfloat16):
        loss_of(model, batch(0).to("fake")).backward()
    assert "runs more than once in a pass" in notes_of(model)["autocast"]
    offload.close(model)


# --- a device that is full ------------------------------------------------------------------------


def test_a_limit_above_the_device_is_brought_down_and_told() -> None:
    torch.fake.set_budget(100 * LAYER_BYTES)  # type: ignore[attr-defined]
    model = deep()
    offload.prepare(model, device="fake", device_memory="24GiB")
    told = notes_of(model)["device_memory"]
    assert "24 GiB are allowed, fake:0 has" in told and "give a smaller device_memory" in told
    device_budget = prepared_of(model).engine.residency.tier.device_budget
    assert device_budget.limit_bytes <= 90 * LAYER_BYTES
    offload.close(model)
    model = deep()
    offload.prepare(model, device="fake", device_memory=95 * LAYER_BYTES)
    assert not notes_of(model) and prepared_of(model).plan.device_bytes == 95 * LAYER_BYTES
    offload.close(model)


def resident_bytes(model: nn.Module) -> int:
    return int(prepared_of(model).transfer.memory.used_bytes)


def run_twice(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model(some()).cpu() for _ in range(2)]


def test_a_full_device_makes_idle_blocks_go_and_is_told_once(fake: DeviceModule) -> None:
    """Memory was taken since by another user of the device: another process, NCCL, a library."""
    expected = run_twice(deep().to("fake"))
    model = deep()
    offload.prepare(model, device="fake", device_memory=100 * LAYER_BYTES)
    assert_same_tensors(run_twice(model), expected)
    assert resident_bytes(model) >= LAYERS * LAYER_BYTES
    residency = prepared_of(model).engine.residency
    for block in residency.blocks:
        residency.tier.evict(block)
    torch.accelerator.empty_cache()
    half = LAYERS // 2 * LAYER_BYTES  # the other blocks have no place
    fake.set_budget(torch.accelerator.memory_allocated() + half + 4096)
    assert_same_tensors(run_twice(model), expected)
    told = notes_of(model)["memory of fake:0"]
    assert "it was full when" in told and "lower device_memory" in told
    counts = prepared_of(model).metrics.snapshot().counts
    tried = counts.get("device_prefetches_without_room", 0)
    assert_same_tensors(run_twice(model), expected)
    counts = prepared_of(model).metrics.snapshot().counts
    assert counts.get("device_prefetches_without_room", 0) <= tried + 1, "it has learnt"
    offload.close(model)


def test_idle_blocks_go_for_whoever_else_needs_the_device(fake: DeviceModule) -> None:
    """Activations come back by a transfer of their own; a second model has one, too."""
    model = deep()
    offload.prepare(model, device="fake")
    run_twice(model)
    held = resident_bytes(model)
    assert held >= LAYERS * LAYER_BYTES
    fake.set_budget(torch.accelerator.memory_reserved())
    other = DeviceTransfer("fake")
    with other.allocate(4 * LAYER_BYTES, "activations") as buffer:
        assert buffer.nbytes == 4 * LAYER_BYTES and resident_bytes(model) < held
        with pytest.raises(CapacityError, match="which the device does not have"):
            other.allocate(PLENTY, "too much")
    other.close()
    offload.close(model)


# --- which device ---------------------------------------------------------------------------------


def test_a_rank_takes_the_device_of_its_number(
    fake: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for local, expected in (("1", 1), ("0", 0), ("7", 0), ("", 0), ("x", 0)):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert find_device("auto") == torch.device("fake", expected)
        assert find_device("fake").index == 0, "the current one, as torch has it"
        assert find_device("fake:0").index == 0
    monkeypatch.setenv("LOCAL_RANK", "0")
    with torch.accelerator.device_index(1):  # user code has chosen
        assert find_device("auto").index == 1


def test_only_its_own_device_is_current_when_host_memory_is_pinned(
    fake: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the device that is current then gets a context, of hundreds of megabytes."""
    seen: list[int] = []
    empty = torch.empty

    def note(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("pin_memory"):
            seen.append(torch.accelerator.current_device_index())
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", note)
    transfer = DeviceTransfer("fake:1")
    transfer.pinned(4, torch.float32)
    transfer.close()
    assert seen == [1, 1] and torch.accelerator.current_device_index() == 0


def test_only_what_is_copied_is_registered(
    fake: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []

    def note(address: int, nbytes: int, device: torch.device) -> Any:
        registered.append(nbytes)
        return register(address, nbytes, device)

    for module in (prepared, coordinator):
        monkeypatch.setattr(module, "Pool", partial(Pool, register=note))
    model = deep()
    optimizer = adamw(model)
    offload.prepare(model, optimizer, device="fake")
    shares = prepared_of(model).shares
    assert shares.state and registered == [shares.params + shares.gradients]
    model(some()).sum().backward()
    optimizer.step()
    offload.close(model)
    del registered[:]
    plain = deep().to("fake")
    wrapped = offload.wrap(adamw(plain))
    fake.reset_counters()
    plain(some()).sum().backward()
    wrapped.step()
    plan = offload.report(wrapped).plan
    assert plan.resident_bytes and registered == [plan.arena_bytes - plan.resident_bytes]
    assert fake.counters()["blocking_copies"] == fake.counters()["pageable_bytes"] == 0
    wrapped.close()


def test_memory_is_sampled_without_the_call_that_sorts(
    fake: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = torch.empty(1000, device="fake:1")
    monkeypatch.setattr(torch.accelerator, "memory_allocated", None)
    assert used_bytes(torch.device("fake", 1)) == on_device_bytes(held.nbytes)


# --- DataParallel ---------------------------------------------------------------------------------


def test_data_parallel_is_refused_with_what_to_do(fake: DeviceModule) -> None:
    model = deep()
    offload.prepare(model, device="fake")
    several = nn.DataParallel(model)
    assert len(several.device_ids) == 2
    with pytest.raises(
        ConfigError, match=r"over devices \[0, 1\].*CUDA_VISIBLE_DEVICES=0.*torchrun"
    ):
        several(some())
    with torch.no_grad():
        one = nn.DataParallel(model, device_ids=[0])
        one.scatter = lambda inputs, kwargs, _: ((inputs,), (kwargs,))  # the fake device has none
        assert_same_tensors([one(some()).cpu()], [model(some()).cpu()])
    offload.close(model)
    assert list(model.parameters()) and "parameters" not in vars(model)
    around = nn.DataParallel(deep())
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=0"):
        offload.prepare(around, device="fake")


# --- streams --------------------------------------------------------------------------------------


def test_transfers_that_have_ended_leave_their_streams_to_the_next(fake: DeviceModule) -> None:
    """A device has 32 of them, and what one frees only that one can have again."""
    used = set()
    for _ in range(5):
        transfer = DeviceTransfer("fake")
        used |= {transfer._up.stream_id, transfer._down.stream_id}
        transfer.close()
    assert len(used) == 2
    with contextlib.closing(DeviceTransfer("fake")) as one:
        with contextlib.closing(DeviceTransfer("fake")) as other:
            streams = {one._up, one._down, other._up, other._down}
            assert len(streams) == 4, "two at a time have their own"
        with contextlib.closing(DeviceTransfer("fake:1")) as there:
            assert there._up.device_index == 1
