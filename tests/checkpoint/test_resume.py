"""Training that was saved and loaded goes on with the bits of training that never stopped.

Configurations are drawn from a seed and printed. What is saved in one split over tiers is loaded
into another; a background save goes on while the one that was saved trains on.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.covering import covering
from support.kernels import assert_same_bits
from support.loops import chosen, tally
from support.models import WORDS, loss_of, make
from torch import Tensor, nn
from torch.optim import lr_scheduler

import offload
from offload.core.budget import Budget
from offload.params import units
from offload.planning import planner

DRAWN = chosen(test=54, torture=540)
# Of the whole training: at most four come before the load, and schedulers change until step 9.
STEPS = chosen(test=12, torture=24)
KI = 1024

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "Lion": lambda p: offload.Lion(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9], gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "warm": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}
VALUES = {
    "optimizer": set(OPTIMIZERS),
    "scheduler": set(SCHEDULERS),
    "dtype": {torch.float32, torch.bfloat16},
    "model": {"gpt", "dropout", "pictures"},
    "has_scaler": {False, True},
    "channels_last": {False, True},
}
# Where the state is: a kind, and how much host memory it gets. None: enough for everything.
PLACES = [
    ("wrap", None),
    ("wrap", "some"),
    ("wrap", "least"),
    ("prepare", None),
    ("prepare", "some"),
    ("prepare", "least"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)
    python, numbers, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    numpy.random.set_state(numbers)
    torch.set_rng_state(torchs)


@dataclass(frozen=True)
class Training:
    """A training, independent of the tiers that hold its bytes."""

    model: str
    dtype: torch.dtype
    optimizer: str
    scheduler: str
    has_scaler: bool
    channels_last: bool


@dataclass(frozen=True)
class Pair:
    number: int
    training: Training
    before: tuple[str, str | None]
    after: tuple[str, str | None]
    chunks: tuple[int, int]
    directories: tuple[int, int]
    stop: int
    background: bool


def draw(number: int) -> Pair:
    rng = random.Random(f"resume {number}")
    model = rng.choice(["gpt", "dropout", "dropout", "pictures"])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    if model == "pictures":  # it makes its own input
        dtype = torch.float32
    optimizer = rng.choice(list(OPTIMIZERS))
    places = list(PLACES)
    # Here a plain optimizer has the same bits and can be either half of a pair. In other cases it
    # is paired with itself only.
    if dtype == torch.float32 and optimizer in ("Adam", "AdamW"):
        places += [("plain", None)] * 6
    before, after = rng.choice(places), rng.choice(places)
    if rng.random() < 0.08:
        before = after = ("plain", None)
    training = Training(
        model,
        dtype,
        optimizer,
        rng.choice(list(SCHEDULERS)),
        has_scaler=rng.random() < 0.3,
        # A prepared model has another memory order, in which convolutions have other bits.
        channels_last=model == "pictures" and "prepare" not in (before[0], after[0]),
    )
    return Pair(
        number,
        training,
        before,
        after,
        (rng.choice([64, 256, 1024]), rng.choice([64, 256, 1024])),
        (rng.choice([1, 2]), rng.choice([1, 2])),
        rng.randint(1, 4),
        rng.random() < 0.5,
    )


def features(pair: Pair) -> set[Hashable]:
    """Return the features of a pair; each feature of any pair must be in a pair that is tested."""
    training, (before, had), (after, has) = pair.training, pair.before, pair.after
    return {
        ("kinds", before, after),
        ("memory before", before, had),
        ("memory after", after, has),
        ("optimizer", training.optimizer, after),
        *((field, getattr(training, field)) for field in VALUES),
        ("chunks", pair.chunks[0] < pair.chunks[1], pair.chunks[0] > pair.chunks[1]),
        ("directories", *pair.directories),
        ("background", pair.background, had),
    }


class Run:
    """The objects of one training, in one place."""

    def __init__(
        self, training: Training, place: tuple[str, str | None], folders: list[Path]
    ) -> None:
        self.model = make(training.model, seed=3, dtype=training.dtype)
        kind, memory = place
        if training.channels_last and kind != "prepare":  # which takes no other memory order
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = OPTIMIZERS[training.optimizer](self.model.parameters())
        if kind == "prepare":
            fields = _prepare_fields(training, memory, folders)
            offload.prepare(self.model, self.optimizer, device="cpu", **fields)
        elif kind == "wrap":
            offload.wrap(self.optimizer, **_wrap_fields(self.optimizer, memory, folders))
        self.stateful: dict[str, Any] = {}
        if training.scheduler != "none":
            self.stateful["scheduler"] = SCHEDULERS[training.scheduler](self.optimizer)
        if training.has_scaler:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            self.stateful["scaler"] = scaler

    def train(self, begin: int, end: int) -> list[float]:
        scaler = self.stateful.get("scaler")
        losses = []
        for _ in range(begin, end):
            tokens = torch.randint(0, WORDS, (3, 6))  # from the global generator
            loss = loss_of(self.model, tokens) * (1 + random.random() + numpy.random.random())
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
            if "scheduler" in self.stateful:
                self.stateful["scheduler"].step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that training has: parameters, buffers, moments, masters, counts."""
        found = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    found[f"{number}/{name}"] = value
        return found

    def settings(self) -> list[Any]:
        groups = self.optimizer.state_dict()["param_groups"]
        states = [each.state_dict() for each in self.stateful.values()]
        return [groups, states, random.getstate(), str(numpy.random.get_state())]

    def close(self) -> None:
        offload.close(self.model)
        offload.close(self.optimizer)


@cache
def least_bytes(training: Training) -> int:
    model = make(training.model, dtype=training.dtype)
    optimizer = OPTIMIZERS[training.optimizer](model.parameters())
    with pytest.raises(offload.CapacityError, match="the least that works") as refused:
        offload.plan(model, optimizer, device="cpu", host_memory=4096, nvme="/tmp")
    return int(str(refused.value).split("about ")[1].split()[0])


def _prepare_fields(training: Training, memory: str | None, folders: list[Path]) -> dict[str, Any]:
    if memory is None:
        return {"host_memory": "64MiB"}
    least = least_bytes(training)
    # Free memory may be fragmented; that is not what is tested here.
    return {"host_memory": least if memory == "least" else 2 * least + 16 * KI, "nvme": folders}


def _wrap_fields(optimizer: Any, memory: str | None, folders: list[Path]) -> dict[str, Any]:
    if memory is None:
        return {"host_memory": "64MiB"}
    whole = offload.plan(optimizer, host_memory="64MiB")
    least = 3 * max(chunk.nbytes for chunk in whole.chunks) + 4096
    share = whole.state_bytes // 2 if memory == "some" else 0
    return {"host_memory": max(least, share), "nvme": folders}


def begin_anew(seed: int = 11) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@cache
def uninterrupted(training: Training, kind: str) -> tuple[list[float], Any, Any]:
    run = Run(training, ("plain" if kind == "plain" else "wrap", None), [])
    begin_anew()
    losses = run.train(0, STEPS)
    tensors = {name: value.clone() for name, value in run.tensors().items()}
    found = losses, tensors, run.settings()
    run.close()
    return found


ALL = [draw(number) for number in range(DRAWN)]
# Quick: from wrap to prepare, and from the least memory to all of it.
PAIRS = chosen(test=covering(ALL, features), torture=ALL, quick=[ALL[6], ALL[37]])


@pytest.mark.quick
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: str(pair.number))
def test_resume_equals_uninterrupted(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(pair)
    tally("resumed pairs")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    is_plain = pair.before == pair.after == ("plain", None)
    losses, tensors, settings = uninterrupted(pair.training, "plain" if is_plain else "wrap")

    monkeypatch.setattr(planner, "CHUNK_NUMEL", pair.chunks[0])
    first = Run(pair.training, pair.before, folders[: pair.directories[0]])
    begin_anew()
    assert first.train(0, pair.stop) == losses[: pair.stop]
    saved = offload.save(
        tmp_path / "checkpoints" / "one",
        first.model,
        first.optimizer,
        extra={"stop": pair.stop},
        background=pair.background,
        **first.stateful,
    )
    if pair.background:
        first.train(0, 2)  # while it is written
        saved = saved.wait()
    assert saved == tmp_path / "checkpoints" / "one"
    first.close()

    monkeypatch.setattr(planner, "CHUNK_NUMEL", pair.chunks[1])
    second = Run(pair.training, pair.after, folders[: pair.directories[1]])
    begin_anew(99)
    extra = offload.load(
        tmp_path / "checkpoints", second.model, second.optimizer, **second.stateful
    )
    assert extra == {"stop": pair.stop}
    assert second.train(pair.stop, STEPS) == losses[pair.stop :]
    assert second.settings() == settings
    found = second.tensors()
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        if value.is_floating_point():
            assert_same_bits(value.reshape(-1), tensors[name].reshape(-1), name)
        else:
            assert torch.equal(value, tensors[name]), name
    second.close()


def test_the_draw_has_everything() -> None:
    """A change of the draw must not remove a kind of case unnoticed."""
    kinds = {(p.before[0], p.after[0]) for p in PAIRS}
    names = ("plain", "wrap", "prepare")
    assert kinds == {(a, b) for a in names for b in names}
    memories = {None, "some", "least"}
    assert {p.before[1] for p in PAIRS} == {p.after[1] for p in PAIRS} == memories
    for field, values in VALUES.items():
        assert {getattr(p.training, field) for p in PAIRS} == values, field
    missing = {(o, k) for o in OPTIMIZERS for k in ("wrap", "prepare")}
    assert not missing - {(p.training.optimizer, p.after[0]) for p in PAIRS}
    assert {p.background for p in PAIRS} == {False, True}
    assert any(p.background and p.before[1] == "least" for p in PAIRS)


def test_frozen_and_unused_parameters(tmp_path: Path) -> None:
    """Parameters without state stay without, and get theirs when they are thawed later."""

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        return model, offload.wrap(optimizer, host_memory="8MiB")

    def train(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            model[1](model[0](torch.ones(2, 8))).sum().backward()  # the last one is not used
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, 3)
    offload.save(tmp_path / "c", model, optimizer)
    other, second = build()
    offload.load(tmp_path / "c", other, second)
    assert set(second.state_dict()["state"]) == {2, 3}
    for each, opt in ((model, optimizer), (other, second)):
        each[0].requires_grad_(True)  # type: ignore[index]
        train(each, opt, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
