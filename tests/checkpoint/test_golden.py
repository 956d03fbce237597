"""Golden checkpoints load in this version, with every value that they were made with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import golden
from support.golden import GOLDEN, LR, build, draws, extra, fields, values
from torch import Tensor

import offload
from offload.checkpoint.format.manifest import Manifest
from offload.checkpoint.format.verify import verify

CHECKPOINTS = sorted(GOLDEN.glob("checkpoint-v*"))
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture(autouse=True)
def random_numbers() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def same(got: Any, expected: Any) -> bool:
    """Return whether both are equal, types and bits included."""
    if type(got) is not type(expected):
        return False
    if isinstance(got, Tensor):
        return got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(got, dict):
        return list(got) == list(expected) and all(same(got[k], expected[k]) for k in got)
    if isinstance(got, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return repr(got) == repr(expected)  # nan, -0.0


def test_there_is_one_for_every_version() -> None:
    assert [path.name for path in CHECKPOINTS] == ["checkpoint-v1"]
    for path in CHECKPOINTS:
        assert sum(file.stat().st_size for file in path.iterdir()) < 100_000


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_every_byte_is_there(path: Path) -> None:
    findings = verify(path)
    assert findings.is_whole, findings.damage
    assert not findings.foreign


def warned(is_plain: bool) -> AbstractContextManager[object]:
    """Expect a warning if the optimizer is plain: it cannot keep the masters of bf16 parameters."""
    return pytest.warns(UserWarning, match="fp32 masters") if is_plain else nullcontext()


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["plain", "wrap", "prepare"])
def test_every_value_comes_back(path: Path, kind: str) -> None:
    model, optimizer, scheduler = build()
    if kind == "prepare":
        offload.prepare(model, optimizer, device="cpu", host_memory="1MiB")
    elif kind == "wrap":
        offload.wrap(optimizer, host_memory="1MiB")
    with warned(kind == "plain"):
        found = offload.load(path, model, optimizer, scheduler=scheduler)
    drawn = draws()
    assert same(found, extra())
    random.seed(golden.SEED)
    numpy.random.seed(golden.SEED)
    torch.manual_seed(golden.SEED)
    assert drawn == draws()
    for name, tensor in model.state_dict().items():
        name = name.replace("head.weight", "embedding.weight")
        assert same(tensor, values(name, tuple(tensor.shape), tensor.dtype)), name
    check_state(model, optimizer, kind)
    assert scheduler.last_epoch == 9 and scheduler.get_last_lr() == [LR, LR]
    offload.close(model)
    offload.close(optimizer)


def check_state(model: Any, optimizer: Any, kind: str) -> None:
    state = optimizer.state_dict()
    expected = fields(model)
    if kind == "plain":  # which keeps moments in the type of the parameter
        dtypes = [param.dtype for group in optimizer.param_groups for param in group["params"]]
        for number, each in expected.items():
            each.pop("master", None)
            for field in ("exp_avg", "exp_avg_sq"):
                each[field] = each[field].to(dtypes[number])
    assert state["state"].keys() == expected.keys()
    for number, each in expected.items():
        got = state["state"][number]
        assert got.keys() == each.keys(), number
        assert all(same(got[field], each[field]) for field in each), number
    groups = state["param_groups"]
    assert [group["lr"] for group in groups] == [LR, LR]
    assert [group["betas"] for group in groups] == [(0.75, 0.9375)] * 2
    assert [group["weight_decay"] for group in groups] == [0.01, 0.25]


def test_the_script_still_makes_the_same(tmp_path: Path) -> None:
    """All is the same but the date, and what later versions add to the state of schedulers."""
    golden.make(tmp_path / "c")
    old, new = (
        Manifest.parse((path / "manifest.json").read_bytes())
        for path in (CHECKPOINTS[-1], tmp_path / "c")
    )
    assert old.tensors.keys() == new.tensors.keys() and old.fingerprint == new.fingerprint
    assert old.files == new.files
    for file in old.files:
        assert (CHECKPOINTS[-1] / file).read_bytes() == (tmp_path / "c" / file).read_bytes(), file
