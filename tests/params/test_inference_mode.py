"""Evaluation under `torch.inference_mode()` around training: the tensors that the engine makes
there are trained later, so they must not be inference tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import chosen
from support.models import MODELS, batch, loss_of, make
from torch import Tensor, nn

import offload
from offload.core.budget import Budget
from offload.core.errors import CapacityError, ConfigError
from offload.params import units
from offload.planning import planner

KI = 1024
STEPS = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)


@pytest.fixture(autouse=True)
def no_tensor_of_that_mode() -> Iterator[None]:
    """Assert that no tensor that outlives the test is an inference tensor."""
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, Tensor)}
    yield
    gc.collect()
    found = [t for t in gc.get_objects() if isinstance(t, Tensor) and id(t) not in before]
    assert not any(tensor.is_inference() for tensor in found)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def least_bytes(name: str, folder: Path) -> int:
    model = make(name)
    with pytest.raises(CapacityError) as refused:
        offload.plan(model, adamw(model), host_memory=4 * KI, nvme=folder)
    return int(str(refused.value).split("about ")[1].split()[0])


def evaluate(model: nn.Module, number: int) -> Tensor:
    """Evaluate as trainers do; return a copy of the answer, which is no inference tensor."""
    model.eval()
    with torch.inference_mode():
        answer = model(batch(number))
        for _ in range(2):  # generation: outputs are the next inputs
            answer = model(answer.reshape(-1)[:18].abs().mul(7).long().remainder(40).view(3, 6))
    model.train()
    return answer.clone()


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Train, and evaluate before the first step, between steps, and between backward and step."""
    seen = [evaluate(model, 7)]
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = loss_of(model, batch(number))
        loss.backward()
        seen += [loss.detach(), evaluate(model, number)]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(evaluate(model, number + 1))
    return seen


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


TIMES = chosen(test=[1.0, 3.0], torture=[1.0, 1.2, 1.5, 1.7, 2.5, 20.0])


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_before_and_between_steps(name: str, tmp_path: Path) -> None:
    least = least_bytes(name, tmp_path)
    plain = make(name)
    expected = train(plain, adamw(plain))
    for times in TIMES:
        model = make(name)
        model, optimizer = offload.prepare(
            model, adamw(model), host_memory=int(times * least), nvme=tmp_path
        )
        assert_equal(train(model, optimizer), expected)
        offload.close(model)
        assert_equal([*model.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("host_bytes", [44 * KI, 1000 * KI])
def test_every_call_inside_the_mode(mode: Any, host_bytes: int, tmp_path: Path) -> None:
    """The model is prepared, edited, saved, loaded and closed in the mode, and trained outside."""
    plain, model = make("gpt"), make("gpt")
    theirs, optimizer = adamw(plain), adamw(model)
    with mode():
        model, optimizer = offload.prepare(model, optimizer, host_memory=host_bytes, nvme=tmp_path)
    assert_equal(train(model, optimizer), train(plain, theirs))
    with mode():
        with offload.resident(model.embedding):
            assert torch.equal(model.embedding.weight, plain.embedding.weight)
        with offload.resident(model.layers[0]):
            model.layers[0].up.weight.mul_(1.5)
        plain.layers[0].up.weight.mul_(1.5)
        offload.save(tmp_path / "saved", model, optimizer)
        values, state = model.state_dict(), optimizer.state_dict()
    assert not any(tensor.is_inference() for tensor in values.values())
    values = {name: tensor.clone() for name, tensor in values.items()}
    assert_equal(train(model, optimizer), train(plain, theirs))
    with mode():
        offload.load(tmp_path / "saved", model, optimizer)
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
    again = train(model, optimizer)
    model.load_state_dict(values)
    optimizer.load_state_dict(state)
    assert_equal(train(model, optimizer), again)
    assert_equal([*model.state_dict().values()], [*plain.state_dict().values()])
    with mode():
        offload.close(model)
    assert not any(param.is_inference() for param in model.parameters())
    assert_equal(train(model, optimizer), train(plain, theirs))


def test_a_step_inside_the_mode(tmp_path: Path) -> None:
    """torch's own optimizers make their state there, which no later step can change."""
    plain, model = make("gpt"), make("gpt")
    theirs = adamw(plain)
    model, optimizer = offload.prepare(model, adamw(model), host_memory=60 * KI, nvme=tmp_path)
    for number in range(3):
        for one in (plain, model):
            loss_of(one, batch(number)).backward()
        theirs.step()
        with torch.inference_mode():
            optimizer.step()
            optimizer.zero_grad()
        theirs.zero_grad()
    offload.close(model)
    assert_equal([*model.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("make_one", [adamw, lambda m: torch.optim.RMSprop(m.parameters(), 1e-3)])
def test_a_wrapped_optimizer(make_one: Any, tmp_path: Path) -> None:
    plain, model = make("gpt"), make("gpt")
    theirs, optimizer = make_one(plain), make_one(model)
    with torch.inference_mode():
        optimizer = offload.wrap(optimizer, host_memory=60 * KI, nvme=tmp_path)
    for number in range(3):
        for one, two in ((plain, theirs), (model, optimizer)):
            loss_of(one, batch(number)).backward()
            two.step() if one is plain else step_inside(two)
            two.zero_grad()
    with torch.inference_mode():
        optimizer.close()
    assert_equal([*model.parameters()], [*plain.parameters()])
    train(model, optimizer)


def step_inside(optimizer: Any) -> None:
    with torch.inference_mode():
        optimizer.step()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_model_that_was_made_in_the_mode(is_trained: bool, tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    optimizer = adamw(model) if is_trained else None
    with pytest.raises(ConfigError, match=r"0.weight: was made under torch.inference_mode\(\)"):
        offload.prepare(model, optimizer, host_memory=60 * KI, nvme=tmp_path)
    del model, optimizer
