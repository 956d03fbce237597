"""Unusual training loops with sharded optimizers of device parameters, for test_stages_device.py:
functions that take a rank run in every process.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fake_accelerator import load
from torch import nn

import offload
from offload.core.errors import CapacityError, ConfigError, StateError
from support.device.stages_cases import SOME, Pair, Wide, start, trains


def otherwise(rank: int, stage: int, directory: str) -> None:
    ranks = start()
    for schedule in SOME[1:]:
        load(*schedule)
        changes(Pair(ranks, stage))
        saved(Pair(ranks, stage), f"{directory}/{schedule}")
        clips_in_the_update(Pair(ranks, stage, max_grad_norm=0.05))
        if stage == 1:
            clips_before(Pair(ranks, stage))
            scales(Pair(ranks, stage))
        else:
            gives_gradients_back(Pair(ranks, stage))
            refuses_a_scaler(Pair(ranks, stage))


def changes(pair: Pair) -> None:
    """Add a group, load a state, step without any gradient, and with zeros instead of None."""
    pair.step()
    extra = nn.Linear(5, 40)
    nn.init.constant_(extra.weight, 0.01)
    nn.init.constant_(extra.bias, 0.02)
    for model, optimizer in ((pair.model, pair.ours), (pair.plain.model, pair.plain.optimizer)):
        model.extra = nn.Linear(5, 40)
        model.extra.load_state_dict(extra.state_dict())
        model.extra.to("fake" if model is pair.model else "cpu")
        optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 3e-3})
    pair.plain.params += pair.plain.model.extra.parameters()
    pair.plain.masters += pair.plain.model.extra.parameters()
    assert pair.step()
    before = [p.detach().clone() for p in pair.model.parameters()]
    state = pair.ours.state_dict()
    pair.step()
    with torch.no_grad():
        for param, value in zip(pair.model.parameters(), before, strict=True):
            param.copy_(value)
    pair.ours.load_state_dict(state)
    pair.ours.step()  # without any gradient
    for param, value in zip(pair.model.parameters(), before, strict=True):
        assert torch.equal(param.detach().cpu(), value.cpu())
    pair.step_again()
    pair.ours.zero_grad(set_to_none=False)
    assert all(
        torch.equal(p.detach().cpu(), q.detach())
        for p, q in zip(pair.model.parameters(), pair.plain.params, strict=True)
    )
    assert pair.has_same_state()
    pair.ours.zero_grad()
    pair.ours.close()
    kept = pair.ours.state[pair.model.first.weight]["exp_avg"]
    number = [id(p) for p in pair.plain.masters].index(id(pair.plain.model.first.weight))
    theirs = pair.plain.optimizer.state[pair.plain.masters[number]]["exp_avg"]
    assert kept.device.type == "fake" and torch.equal(kept.cpu(), theirs)


def saved(pair: Pair, directory: str) -> None:
    """Write and read a checkpoint on all ranks."""
    pair.step()
    offload.save(directory, pair.model, pair.ours)
    right = [p.detach().cpu() for p in pair.model.parameters()]
    pair.step()
    offload.load(directory, pair.model, pair.ours)
    for param, value in zip(pair.model.parameters(), right, strict=True):
        assert torch.equal(param.detach().cpu(), value)
    pair.step_again()
    for p, q in zip(pair.model.parameters(), pair.plain.params, strict=True):
        assert torch.equal(p.detach().cpu(), q.detach())
    assert pair.has_same_state()
    pair.ours.close()


def clips_before(pair: Pair) -> None:
    for _ in range(3):
        pair.backward(1, 1)
        for model in (pair.model, pair.plain.model):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)
        pair.ours.step()
        pair.plain.step()
        for p, q in zip(pair.model.parameters(), pair.plain.params, strict=True):
            assert torch.equal(p.detach().cpu(), q.detach())
    pair.ours.close()


def clips_in_the_update(pair: Pair) -> None:
    """Clip by the norm over all ranks, which must be the same on all."""
    pair.backward(1, 1)
    squares = [p.grad.double().square().sum() for p in pair.plain.params if p.grad is not None]
    right = float(torch.stack(squares).sum().sqrt())
    pair.ours.step()
    assert abs(pair.ours.grad_norm / right - 1) < 1e-9 and right > 0.05
    said = pair.ranks.exchange([float(pair.ours.grad_norm).hex(), sums(pair.model)], "the norm")
    assert said[0] == said[1]
    pair.ours.close()


def sums(model: nn.Module) -> list[float]:
    return [float(p.detach().cpu().double().sum()) for p in model.parameters()]


def scales(pair: Pair) -> None:
    """Check that all ranks skip the step if gradients are not finite."""
    scaler = torch.amp.GradScaler("fake", init_scale=64.0)
    scaler.scale(torch.ones((), device="fake"))  # so that it has a scale
    for turn in range(3):
        before = sums(pair.model)
        pair.backward(1, 1)
        for p in pair.model.parameters():
            if p.grad is not None:
                p.grad.mul_(scaler.get_scale() * (float("inf") if turn == 1 else 1.0))
        scaler.step(pair.ours)
        scaler.update()
        assert (sums(pair.model) == before) is (turn == 1)
        if turn != 1:
            pair.plain.step()
        for p, q in zip(pair.model.parameters(), pair.plain.params, strict=True):
            assert torch.equal(p.detach().cpu(), q.detach())
    assert scaler.get_scale() == 32.0
    pair.ours.close()


def refuses_a_scaler(pair: Pair) -> None:
    scaler = torch.amp.GradScaler("fake", init_scale=64.0)
    scaler.scale(pair.model(pair.input(0).to("fake"))).backward()
    refused(ConfigError, "GradScaler: .*bfloat16", lambda: scaler.step(pair.ours))
    pair.ours.zero_grad()
    pair.ours.close()


def gives_gradients_back(pair: Pair) -> None:
    pair.step()
    pair.backward(1, 1)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.ours.close()
    for p, q in zip(pair.model.parameters(), pair.plain.params, strict=True):
        assert (p.grad is None) is (q.grad is None)
        assert p.grad is None or torch.equal(p.grad.cpu(), q.grad)


def refused(kind: type[Exception], text: str, act: Callable[[], object]) -> None:
    try:
        act()
    except kind as error:
        assert re.search(text, str(error)), error
        return
    raise AssertionError(f"expected {kind.__name__}: {text}")


def refusals(rank: int) -> None:
    """Check that each refusal is raised on all ranks, and that no rank waits for another."""
    start()
    for stage in (1, 2):
        refuses_places(rank, partial(offload.wrap, release_grads=stage == 2))
    params = ones("fake")
    optimizer = offload.wrap(sgd(params))
    params[0].grad = torch.full_like(params[0], 1.0 + rank)
    refused(StateError, "differ in the gradient of group 0 param 0.*release", optimizer.step)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert params[0].detach().cpu().eq(0.9).all()
    optimizer.close()


def ones(*places: str) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(40, device=place)) for place in places]


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def refuses_places(rank: int, wrap: Callable[[Any], Any]) -> None:
    """Refuse parameters that are in the wrong place, values that differ, and too little memory."""
    for places in (("fake", "cpu"), ("cpu", "fake"), ("fake:0", "fake:1")):
        refused(ConfigError, "all on one device", partial(wrap, sgd(ones(*places))))
    other = ones("fake" if rank else "cpu")
    refused(
        ConfigError,
        "device: rank 1 and rank 0 differ in the kind of device .fake and cpu",
        partial(wrap, sgd(other)),
    )
    params = ones("fake")
    params[0].data.add_(rank)
    refused(ConfigError, "differ in the values of group 0 param 0", partial(wrap, sgd(params)))
    optimizer = wrap(sgd(ones("fake")))
    group = {"params": ones("cpu")}
    refused(ConfigError, "all on one device", partial(optimizer.add_param_group, group))
    optimizer.close()
    params = ones("cpu")
    optimizer = wrap(sgd(params))
    params[0].data = params[0].data.to("fake")
    refused(ConfigError, "were on the CPU when ranks began", optimizer.step)
    params = ones("fake", "fake")
    gc.collect()
    torch.accelerator.empty_cache()
    for_one_bytes = torch.accelerator.memory_allocated() + 512
    torch.fake.set_budget(for_one_bytes)  # type: ignore[attr-defined]
    refused(CapacityError, "network buffer", partial(wrap, sgd(params)))
    torch.fake.set_budget(1 << 26)  # type: ignore[attr-defined]


def three(rank: int) -> None:
    """Train on three ranks: some own no part of small parameters, and fp32 means are added in the
    order of ranks.
    """
    ranks = start()
    load("seeded", 21)
    pair = Pair(ranks, 1)
    assert trains(pair) and pair.has_same_state()
    pair.ours.close()
    pair = Pair(ranks, 2, Wide)
    assert trains(pair) and pair.has_same_state()
    pair.ours.close()


def broken(rank: int, stage: int) -> str:
    """Raise an error in the middle of a step: the other rank raises, too, and no step follows."""
    pair = Pair(start(), stage, Wide)
    held = torch.accelerator.memory_allocated()
    for schedule in SOME[1:]:
        load(*schedule)
        pair = Pair(pair.ranks, stage, Wide)
        pair.step()
        pair.backward(1, 1)
        if rank == 1:
            recipe, turns = pair.ours._offload_session._recipe, iter(range(100))
            update = recipe.update
            recipe.update = lambda work, u=update, t=turns: u(work) if next(t) < 3 else 1 / 0
        kind = ZeroDivisionError if rank else StateError
        refused(kind, "division by zero", pair.ours.step)
        refused(StateError, "different steps|no rank continues|earlier error", pair.ours.step)
        pair.ours.close()
        pair.model.zero_grad()
        gc.collect()
        torch.accelerator.synchronize()
        assert torch.accelerator.memory_allocated() <= held, schedule
    return "ended"
