"""The least host memory that a refusal names: a model trains with it; a page less is refused before
anything is allocated, and without the refusal a page less does not train.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import SEED, chosen, tally
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

import offload
from offload.core.budget import Budget
from offload.core.errors import CapacityError
from offload.params import units
from offload.planning import planner, unit

PAGE = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 256)


class Drawn(nn.Module):
    """A model of layers of odd sizes, drawn at random: some are frozen; two may share a bias, all
    may be checkpointed in one or two segments, and the model itself may use a layer's weight.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.randint(9, 60)
        inner = [draw.randint(5, 90) for _ in range(draw.randint(2, 6))]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, n), nn.GELU(), nn.Linear(n, width)) for n in inner)
        )
        self.width, self.segments = width, draw.choice([0, 0, 1, 2])
        self.borrows = draw.random() < 0.3
        if draw.random() < 0.3:  # two layers share a bias
            self.layers[-1][2].bias = self.layers[0][2].bias
        for layer in self.layers:
            layer.requires_grad_(draw.random() < 0.8)
        self.layers[0].requires_grad_(True)
        self.to(draw.choice([torch.float32, torch.float32, torch.bfloat16]))

    def forward(self, x: Tensor) -> Tensor:
        if self.borrows:
            x = x + functional.linear(x, self.layers[0][0].weight)[..., :1]
        if self.segments and torch.is_grad_enabled():
            return checkpoint_sequential(self.layers, self.segments, x, use_reentrant=False)  # type: ignore[return-value]
        out: Tensor = self.layers(x)
        return out


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-3),
}


def built(seed: int) -> tuple[nn.Module, Any]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Drawn(draw)
    make = OPTIMIZERS[draw.choice([*OPTIMIZERS])]
    return model, make([p for p in model.parameters() if p.requires_grad])


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    seen = []
    dtype = next(model.parameters()).dtype
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(3, model.width, dtype=dtype, requires_grad=True)  # type: ignore[arg-type]
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            seen += [loss.detach().clone(), model(x.detach()).clone()]
    return seen


def told(error: BaseException) -> int:
    found = re.search(r"(?:least that works is (?:about )?|need )(\d+)", str(error))
    assert found is not None, error
    return int(found[1])


def options_of(seed: int, folder: Path) -> dict[str, Any]:
    draw = random.Random(seed + 1)
    found: dict[str, Any] = {"activations": draw.choice(["keep", "recompute", "offload"])}
    if draw.random() < 0.85 or found["activations"] == "offload":
        found["nvme"] = folder
    return found


SEEDS = range(SEED, SEED + chosen(test=8, torture=200))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_prepare_tells(
    seed: int, tmp_path: Path, own_budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(seed, tmp_path)
    with pytest.raises(CapacityError) as refused:
        offload.plan(*built(seed), host_memory=PAGE, **options)
    least = told(refused.value)
    offload.plan(*built(seed), host_memory=least, **options)
    model, optimizer = built(seed)
    with pytest.raises(CapacityError) as again:
        offload.prepare(model, optimizer, host_memory=least - PAGE, **options)
    assert told(again.value) == least and own_budget.used_bytes == 0
    assert not any(tmp_path.iterdir())
    offload.prepare(model, optimizer, host_memory=least, **options)
    assert own_budget.used_bytes <= least
    seen = train(model, optimizer)
    offload.close(model)
    plain, theirs = built(seed)
    theirs = offload.wrap(theirs)  # for the masters of 16-bit parameters
    for ours, expected in zip(seen, train(plain, theirs), strict=True):
        assert torch.equal(ours, expected)
    theirs.close()
    tally("least budgets")
    if "nvme" in options:
        assert_no_less_works(seed, least, options, monkeypatch)


def assert_no_less_works(
    seed: int, least: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that a page less for parameters does not train when the refusal is out of the way."""
    enough = unit.UnitSizes.least_bytes.fget  # type: ignore[attr-defined]
    model, optimizer = built(seed)
    with monkeypatch.context() as patch:
        patch.setattr(unit.UnitSizes, "least_bytes", property(lambda self: enough(self) - PAGE))
        try:
            made = offload.plan(model, optimizer, host_memory=least - PAGE, **options)
        except CapacityError as error:  # to hold all parameters takes less than to fetch them
            assert told(error) == least
            return
        if made.shares.holds_all_params or made.shares.params >= enough(sizes_of(model)):
            return  # it was not the parameters that were short of room
        with pytest.raises(CapacityError):
            offload.prepare(model, optimizer, host_memory=least - PAGE, **options)
            train(model, optimizer)
        offload.close(model)


def sizes_of(model: nn.Module) -> unit.UnitSizes:
    return unit.UnitSizes.of(units.find_units(model))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_wrap_tells(seed: int, tmp_path: Path, own_budget: Budget) -> None:
    model, optimizer = built(seed)
    if type(optimizer) is torch.optim.SGD and not optimizer.defaults["momentum"]:
        return  # it has no state
    with pytest.raises(CapacityError) as refused:
        offload.wrap(optimizer, host_memory=1, nvme=tmp_path)
    least = told(refused.value)
    with pytest.raises(CapacityError):
        offload.wrap(optimizer, host_memory=least - 1, nvme=tmp_path)
    assert own_budget.used_bytes == 0
    optimizer = offload.wrap(optimizer, host_memory=max(least, PAGE), nvme=tmp_path)
    train(model, optimizer)
    optimizer.close()
    tally("least budgets")
