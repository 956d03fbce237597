"""`offload.save` and `offload.load`: what is saved, what is refused, what goes wrong in between.

That a loaded training goes on with the same bits is in test_resume.py.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import children
from support.bits import assert_same_named
from support.models import Gpt, make
from support.training import train
from torch import Tensor, nn

import offload
from offload.checkpoint import shard
from offload.checkpoint.format.directory import CheckpointDirectory
from offload.checkpoint.format.manifest import Manifest
from offload.checkpoint.format.values import decode
from offload.core.errors import ConfigError, CorruptionError, FormatError, StateError, StoreError
from offload.optim.saver import READS, Saver
from offload.optim.tiers import HostChunk
from offload.optim.updater import Updater
from offload.params import units

pytestmark = pytest.mark.usefixtures("nothing_is_left")
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr("offload.planning.planner.LEAST_CHUNK_NUMEL", 64)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def manifest_of(path: Path) -> Manifest:
    with CheckpointDirectory(path) as directory:
        return directory.read_manifest()


def values_of(path: Path, section: str) -> Any:
    return decode(manifest_of(path).values[section], lambda name: f"tensor {name}")


def build(dtype: torch.dtype = torch.float32, name: str = "gpt", **fields: Any) -> tuple[Any, Any]:
    model = make(name, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, offload.wrap(optimizer, **fields) if fields else optimizer


def on_disk(folder: Path) -> dict[str, Any]:
    """Return fields of `wrap` that leave a small part of the state in memory, the rest on disk."""
    return {"host_memory": 60_000, "nvme": folder}


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
    return found


def loaded(path: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> dict[str, Tensor]:
    """Load a checkpoint into new objects, in memory unless `fields` say otherwise; return their
    tensors.
    """
    model, optimizer = build(dtype, **(fields or {"host_memory": "8MiB"}))
    offload.load(path, model, optimizer)
    found = state_of(model, optimizer)
    optimizer.close()
    return found


# --- what a checkpoint consists of ----------------------------------------------------------------


def test_names_of_a_model_and_its_state(tmp_path: Path) -> None:
    model, optimizer = build(torch.bfloat16, **on_disk(tmp_path))
    train(model, optimizer, range(0, 2))
    path = offload.save(tmp_path / "c", model, optimizer, extra={"step": 2})
    tensors = manifest_of(path).tensors
    names = [f"model/{name}" for name in model.state_dict() if name != "head.weight"]
    fields = [f"{name}/{f}" for name in names for f in ("master", "exp_avg", "exp_avg_sq")]
    fields = [name.replace("model/", "optimizer/") for name in fields]
    assert set(tensors) == {*names, *fields}
    assert values_of(path, "model")["aliases"] == {"head.weight": "embedding.weight"}
    assert {tensors[name].dtype for name in names} == {"BF16"}
    assert {tensors[name].dtype for name in fields} == {"F32"}
    values = values_of(path, "optimizer")
    assert values["class"] == "AdamW"
    assert values["groups"][0]["params"] == [n for n, _ in model.named_parameters()]
    assert values["groups"][0]["settings"]["lr"] == 1e-2
    bits = numpy.float32(2.0).tobytes()
    assert set(values["states"]) == set(values["groups"][0]["params"])
    assert all(s == {"step": {"tensor": "F32", "bits": bits}} for s in values["states"].values())
    assert values_of(path, "extra") == {"step": 2}
    optimizer.close()


def test_parameters_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Parameters of a module that is saved beside the model are named by group and index, unless
    the model has them under names of its own. Parameters of no saved module are refused: their
    values would be lost.
    """

    def objects() -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.ParameterList([torch.ones(3), torch.ones(4)]))
        inner = list(model.parameters())
        extra = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(6))]
        groups = [{"params": [extra[0], *inner]}, {"params": [extra[1]], "lr": 0.5}]
        return model, nn.ParameterList(extra), torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def step(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()

    model, beside, optimizer = objects()
    step(optimizer)
    told = r"param_groups\[0\]\['params'\]\[0\] of shape \(5,\).*pass its module by name"
    with pytest.raises(ConfigError, match=told):
        offload.save(tmp_path / "c", model, optimizer)
    assert not os.listdir(tmp_path)
    path = offload.save(tmp_path / "c", model, optimizer, beside=beside)
    names = [group["params"] for group in values_of(path, "optimizer")["groups"]]
    assert names == [["#0.0", "0.0", "0.1"], ["1.0"]]
    other, others, second = objects()
    with pytest.raises(ConfigError, match=told):
        offload.load(path, other, second)
    second = offload.wrap(second, host_memory="8MiB")
    offload.load(path, other, second, beside=others)
    assert all(map(torch.equal, beside.parameters(), others.parameters()))
    step(optimizer)
    step(second)
    states = second.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], states[number]["momentum_buffer"])
    second.close()


def test_extra_and_stateful_objects_of_any_kind(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.state: Any = None

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    model = nn.Linear(2, 2)
    loader, ema = Loader(), nn.Linear(3, 3).double()
    weights = torch.arange(6.0).view(2, 3).t()
    loader.state = {"at": numpy.int64(7), "seen": [1, (2, None)], 3: b"\0x", "inf": float("inf")}
    extra = {"w": weights, "again": weights, "flags": torch.tensor([True, False]), "n": 2**70}
    path = offload.save(tmp_path / "c", model, extra=extra, loader=loader, ema=ema)
    other, averaged = Loader(), nn.Linear(3, 3).double()
    found = offload.load(path, nn.Linear(2, 2), loader=other, ema=averaged)
    assert torch.equal(found["w"], weights) and found["again"] is found["w"]
    assert found["flags"].tolist() == [True, False] and found["n"] == 2**70
    assert other.state == {"at": 7, "seen": [1, (2, None)], 3: b"\0x", "inf": float("inf")}
    assert type(other.state["at"]) is int
    assert torch.equal(averaged.weight, ema.weight)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    def objects() -> tuple[nn.Module, Any]:
        model = nn.Linear(3, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), fused=True)

    model, optimizer = objects()
    offload.save(tmp_path / "c", model, optimizer)
    other, second = objects()
    second.param_groups[0]["lr"].fill_(9.0)
    offload.load(tmp_path / "c", other, second)
    rate = second.param_groups[0]["lr"]
    assert isinstance(rate, Tensor) and rate == 0.25


def test_state_that_a_module_adds_by_itself(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count, "seen": torch.tensor([self.count])}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"] + int(state["seen"][0])

    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    model[0].count = 4
    offload.save(tmp_path / "c", model)
    other = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    offload.load(tmp_path / "c", other)
    assert other[0].count == 8


def test_types_and_shapes_of_every_kind(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, dtype in {
                "flags": torch.bool, "u8": torch.uint8, "i64": torch.int64,
                "f64": torch.float64, "f16": torch.float16, "c64": torch.complex64,
                "f8": torch.float8_e4m3fn,
            }.items():  # fmt: skip
                values = torch.randint(0, 2, (3, 5), dtype=torch.int64).to(dtype)
                self.register_buffer(name, values)
            self.register_buffer("nothing", torch.empty(0, 3))
            self.register_buffer("single", torch.tensor(2.5))
            self.register_buffer("turned", torch.randn(4, 6).t())
            self.register_buffer("hidden", torch.zeros(2), persistent=False)

    torch.manual_seed(5)
    model = Odd()
    offload.save(tmp_path / "c", model)
    other = Odd()
    offload.load(tmp_path / "c", other)
    for name, value in model.state_dict().items():
        assert bytes(value.reshape(-1).view(torch.uint8).tolist()) == bytes(
            other.state_dict()[name].reshape(-1).view(torch.uint8).tolist()
        ), name
    assert "model/hidden" not in manifest_of(tmp_path / "c").tensors


# --- what is refused ------------------------------------------------------------------------------


def unchanged(model: Any, optimizer: Any, action: Callable[[], Any]) -> None:
    before = state_of(model, optimizer)
    torchs, python = torch.get_rng_state(), random.getstate()
    action()
    assert_same_named(state_of(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), torchs) and random.getstate() == python


class Other(nn.Module):
    """A module like a `Gpt` but for some names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 16)
        self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(13))


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 1))
    path = offload.save(tmp_path / "c", model, optimizer)
    other = Other()
    second = torch.optim.AdamW(other.parameters(), fused=True)

    def load() -> None:
        with pytest.raises(ConfigError, match="nothing was changed") as refused:
            offload.load(path, other, second)
        told = str(refused.value)
        assert "more.12.bias" not in told  # beyond the first twenty
        assert "not in the checkpoint (52): more.0.weight" in told
        assert "and 32 more" in told
        assert "only in the checkpoint" in told and "layers.0.norm1.weight" in told
        assert "embedding.weight (saved as torch.float32 (40, 16), here it is torch.float32" in told

    unchanged(other, second, load)
    optimizer.close()


@pytest.mark.parametrize(
    "how, told",
    [
        ("dtype", r"embedding.weight \(saved as torch.float32 .* here it is torch.bfloat16"),
        ("class", r"optimizer \(saved from AdamW, here it is Adam\)"),
        ("groups", r"param_groups \(saved 1, here there are 2\)"),
        ("params", r"not in the checkpoint \(1\): embedding.weight of param_groups\[0\]"),
        ("scheduler", r"not in the checkpoint \(1\): scheduler"),
        ("tied", r"head.weight \(a tensor of its own is saved, here it is tied to embedding"),
    ],
)
def test_objects_that_do_not_fit(tmp_path: Path, how: str, told: str) -> None:
    saved = Gpt()
    if how == "tied":
        saved.head.weight = nn.Parameter(saved.head.weight.detach().clone())
    begin = 1 if how == "params" else 0
    first = torch.optim.AdamW(list(saved.parameters())[begin:], fused=True)
    offload.wrap(first, host_memory="8MiB")
    path = offload.save(tmp_path / "c", saved, first)
    first.close()
    model: Any = Gpt().bfloat16() if how == "dtype" else Gpt()
    params: Any = list(model.parameters())
    if how == "groups":
        params = [{"params": params[:3]}, {"params": params[3:]}]
    kind = torch.optim.Adam if how == "class" else torch.optim.AdamW
    optimizer = offload.wrap(kind(params, fused=True), host_memory="8MiB")
    stateful = {}
    if how == "scheduler":
        stateful = {"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}

    def load() -> None:
        with pytest.raises(ConfigError, match=told):
            offload.load(path, model, optimizer, **stateful)

    unchanged(model, optimizer, load)
    optimizer.close()


def test_what_was_saved_must_be_asked_for(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, range(0, 1))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    path = offload.save(tmp_path / "c", model, optimizer, scheduler=scheduler)
    with pytest.raises(ConfigError, match=r"only in the checkpoint \(1\): scheduler"):
        offload.load(path, model, optimizer)
    with pytest.raises(ConfigError, match=r"only in the checkpoint \(1\): optimizer"):
        offload.load(path, model, scheduler=scheduler)
    other, _ = build()
    offload.load(path, other)  # for evaluation
    assert_same_named(other.state_dict(), model.state_dict())
    alone = offload.save(tmp_path / "d", model)
    with pytest.raises(ConfigError, match=r"not in the checkpoint \(1\): optimizer"):
        offload.load(alone, model, optimizer)


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    for arguments, told in [
        ((3, model, optimizer), "path: expected a directory"),
        ((tmp_path / "c", optimizer), "model: expected a torch.nn.Module, got AdamW"),
        ((tmp_path / "c", model, model), "optimizer: expected a torch.optim.Optimizer, got Gpt"),
    ]:
        with pytest.raises(ConfigError, match=told):
            offload.save(*arguments)
        with pytest.raises(ConfigError, match=told):
            offload.load(*arguments)
    for fields, told in [
        ({"keep": 0}, "keep: expected"),
        ({"keep": True}, "keep: expected"),
        ({"rng": optimizer}, "rng: is a name that every checkpoint has"),
        ({"step": 3}, r"step: expected something with state_dict\(\) .* extra="),
        ({"extra": {"a": [1, {2, 3}]}}, r"save: extra: \['a'\]\[1\]: cannot be saved: .*set"),
        ({"extra": numpy.ones(3)}, "cannot be saved: .*ndarray"),
    ]:
        with pytest.raises(ConfigError, match=told):
            offload.save(tmp_path / "c", model, optimizer, **fields)
    assert list(tmp_path.iterdir()) == []
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="weight: is on the meta device"):
        offload.save(tmp_path / "c", empty)
    offload.save(tmp_path / "c", model, optimizer)
    with pytest.raises(ConfigError, match=r"c\b"):  # it is there already
        offload.save(tmp_path / "c", model, optimizer)
    with pytest.raises((ConfigError, FormatError)):
        offload.load(tmp_path / "nothing", model, optimizer)


@pytest.mark.quick
def test_a_damaged_byte_is_found_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 1))
    path = offload.save(tmp_path / "c", model, optimizer)
    train(model, optimizer, range(1, 2))
    file = path / "optimizer-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)

    def load() -> None:
        with pytest.raises(CorruptionError, match="optimizer/"):
            offload.load(path, model, optimizer)

    unchanged(model, optimizer, load)
    optimizer.close()


def test_a_mixed_state_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 1))
    expected = state_of(model, optimizer)
    good = offload.save(tmp_path / "good", model, optimizer)
    with monkeypatch.context() as patch:
        fail_update(patch, after=2)
        with pytest.raises(OSError, match="no more"):
            train(model, optimizer, range(1, 2))
    with pytest.raises(StateError, match=r"an earlier step failed halfway.* last one: .*good"):
        offload.save(tmp_path / "bad", model, optimizer)
    assert not (tmp_path / "bad").exists()
    offload.load(good, model, optimizer)  # repairs it
    assert_same_named(state_of(model, optimizer), expected)
    train(model, optimizer, range(1, 2))
    optimizer.close()


def fail_update(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make a step fail after `after` chunks."""
    original, left = Updater._update, [after]

    def update(self: Updater, *args: Any) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("no more")
        return original(self, *args)

    monkeypatch.setattr(Updater, "_update", update)


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_an_error_in_the_middle_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    class Fragile:
        loads = 0

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            self.loads += 1

    model, optimizer = build()
    if kind == "wrap":
        offload.wrap(optimizer, **on_disk(tmp_path))
    else:
        offload.prepare(model, optimizer, device="cpu", host_memory=120_000, nvme=tmp_path)
    fragile = Fragile()
    train(model, optimizer, range(0, 1))
    path = offload.save(tmp_path / "c", model, optimizer, fragile=fragile)
    expected = state_of(model, optimizer)
    train(model, optimizer, range(1, 2))
    with monkeypatch.context() as patch:
        break_reads(patch, where)
        with pytest.raises(OSError, match="broken"):
            offload.load(path, model, optimizer, fragile=fragile)
    assert fragile.loads == 2, "it was put back"
    with pytest.raises(StateError, match=r"an earlier load .* failed halfway"):
        train(model, optimizer, range(2, 3))
    with pytest.raises(StateError, match="an earlier load"):
        offload.save(tmp_path / "d", model, optimizer, fragile=fragile)
    offload.load(path, model, optimizer, fragile=fragile)
    assert_same_named(state_of(model, optimizer), expected)
    train(model, optimizer, range(1, 2))
    optimizer.close()


def break_reads(patch: pytest.MonkeyPatch, section: str) -> None:
    """Make the third read of a section fail, after the whole checkpoint has been verified."""
    from offload.checkpoint.reader import SavedTensorSource

    original, left = SavedTensorSource.read_into, [2]

    def read_into(self: Any, begin_bytes: int, target: Tensor) -> None:
        if self.name.startswith(section):
            left[0] -= 1
            if left[0] < 0:
                raise OSError("broken")
        original(self, begin_bytes, target)

    patch.setattr(SavedTensorSource, "read_into", read_into)


# --- between kinds --------------------------------------------------------------------------------


def test_masters_come_and_go(tmp_path: Path) -> None:
    """A plain optimizer keeps no masters: they are left out with a warning when it loads, and made
    from the parameters when a wrapped optimizer loads what it has saved.
    """
    model, optimizer = build(torch.bfloat16, **on_disk(tmp_path))
    train(model, optimizer, range(0, 2))
    offload.save(tmp_path / "c", model, optimizer)
    masters = optimizer.state_dict()["state"][0]["master"]
    plain, second = build(torch.bfloat16)
    with pytest.warns(UserWarning, match="fp32 masters"):
        offload.load(tmp_path / "c", plain, second)
    assert second.state_dict()["state"][0]["exp_avg"].dtype == torch.bfloat16
    offload.save(tmp_path / "d", plain, second)
    offload.load(tmp_path / "d", model, optimizer)
    again = optimizer.state_dict()["state"][0]["master"]
    assert torch.equal(again, model.embedding.weight.detach().float())
    assert not torch.equal(again, masters)
    offload.load(tmp_path / "c", model, optimizer)
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], masters)
    optimizer.close()


def test_weights_of_others_stay_in_their_files(tmp_path: Path) -> None:
    """A frozen model is read from its original weight files; loading the same values does not
    change that.
    """
    from safetensors.torch import save_file

    model = make("thrice")
    save_file(dict(model.state_dict()), tmp_path / "weights.safetensors")
    folder = tmp_path / "swap"
    folder.mkdir()

    def prepared() -> Any:
        fields = {"device": "cpu", "host_memory": 60_000, "nvme": folder}
        frozen = make("thrice", seed=4).requires_grad_(False)
        return offload.prepare(frozen, weights=tmp_path / "weights.safetensors", **fields)

    first = prepared()
    path = offload.save(tmp_path / "c", first)
    offload.load(path, first)
    assert not offload.params.prepared.prepared_of(first)._spare  # type: ignore[attr-defined]
    other = make("thrice", seed=9)
    offload.load(path, other)
    assert_same_named(other.state_dict(), model.state_dict())
    changed = make("thrice", seed=9)
    offload.save(tmp_path / "d", changed)
    offload.load(tmp_path / "d", first)
    assert_same_named(dict(first.state_dict()), changed.state_dict())
    offload.close(first)


def test_an_optimizer_without_a_kernel_in_sixteen_bits(tmp_path: Path) -> None:
    """The scalars of an optimizer's state are saved and loaded; its masters are not among them."""

    def objects(turn: int) -> tuple[Any, Any]:
        model = make("gpt", dtype=torch.bfloat16)
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
        return model, offload.wrap(optimizer, host_memory=60_000 * turn, nvme=tmp_path)

    model, optimizer = objects(1)
    train(model, optimizer, range(0, 2))
    path = offload.save(tmp_path / "c", model, optimizer)
    states = values_of(path, "optimizer")["states"]
    assert all(set(state) == {"step", "mu_product"} for state in states.values())
    other, second = objects(2)
    offload.load(path, other, second)
    assert_same_named(state_of(other, second), state_of(model, optimizer))
    for each in (second, optimizer):
        assert "master" not in each._offload_session.updater.records[0].scalars
        each.close()


# --- in the background ----------------------------------------------------------------------------


class Held:
    """A hold on all savers: each waits at the start of `run` until the test sets `may_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go = threading.Event(), threading.Event()
        original = Saver.run

        def run(saver: Saver) -> None:
            self.begun.set()
            assert self.may_go.wait(WAIT_S)
            original(saver)

        monkeypatch.setattr(Saver, "run", run)


@pytest.mark.parametrize("fields", [{"host_memory": "8MiB"}, None], ids=["memory", "disk"])
def test_steps_save_what_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: Any
) -> None:
    """The saver's thread starts too late for every chunk: the steps save what they change."""
    held = Held(monkeypatch)
    model, optimizer = build(torch.bfloat16, **(fields or on_disk(tmp_path)))
    train(model, optimizer, range(0, 2))
    expected = state_of(model, optimizer)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    train(model, optimizer, range(2, 4))
    assert not ticket.done and not (tmp_path / "c").exists()
    held.may_go.set()
    assert ticket.wait(WAIT_S) == tmp_path / "c"
    assert optimizer._offload_session.updater._tiers.watcher is None
    assert "checkpoint" in offload.report(optimizer).total.seconds
    optimizer.close()
    assert_same_named(loaded(tmp_path / "c", torch.bfloat16), expected)


def test_a_step_waits_for_a_chunk_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build(host_memory="8MiB")
    train(model, optimizer, range(0, 2))
    expected = state_of(model, optimizer)
    writing, waited = threading.Event(), threading.Event()
    write, wait = Saver._write, Saver._await

    def slow(self: Saver, piece: HostChunk) -> None:
        if threading.current_thread() is not threading.main_thread() and not writing.is_set():
            writing.set()
            assert waited.wait(WAIT_S)  # a step has reached the chunk, and waits
        write(self, piece)

    def seen(self: Saver, number: int) -> None:
        waited.set()
        wait(self, number)

    monkeypatch.setattr(Saver, "_write", slow)
    monkeypatch.setattr(Saver, "_await", seen)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    assert writing.wait(WAIT_S)
    train(model, optimizer, range(2, 4))
    assert waited.is_set()
    ticket.wait(WAIT_S)
    optimizer.close()
    assert_same_named(loaded(tmp_path / "c"), expected)


def test_a_buffer_is_not_reused_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is dirty at the save is written unchanged before a pass that changes nothing
    uses its buffer for another chunk.
    """
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 3))
    assert optimizer._offload_session.updater._tiers.unwritten
    writing, released = threading.Event(), threading.Event()
    write, release = Saver._write, Saver.before_release

    def slow(self: Saver, piece: HostChunk) -> None:
        is_resident = piece.chunk.number in self._tiers.resident
        in_buffer = piece.chunk.number in self._here and not is_resident
        if in_buffer and not writing.is_set():
            writing.set()
            assert released.wait(WAIT_S)  # the pass below needs the buffer
        write(self, piece)

    def seen(self: Saver, piece: HostChunk) -> None:
        if piece.chunk.number in self._here:
            released.set()
        release(self, piece)

    monkeypatch.setattr(Saver, "_write", slow)
    monkeypatch.setattr(Saver, "before_release", seen)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    assert writing.wait(WAIT_S)
    now = state_of(model, optimizer)  # passes over all chunks, and needs all buffers
    assert released.is_set()
    ticket.wait(WAIT_S)
    optimizer.close()
    assert_same_named(loaded(tmp_path / "c"), now)


def test_memory_of_a_save_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 2))
    made: list[int] = []
    original = Saver._make_memory

    def make_memory(self: Saver) -> Tensor:
        memory = original(self)
        made.append(memory.nbytes)
        return memory

    monkeypatch.setattr(Saver, "_make_memory", make_memory)
    offload.save(tmp_path / "c", model, optimizer)
    plan = offload.report(optimizer).plan
    assert plan.disk_bytes > 2 * sum(made)
    assert 1 <= len(made) <= READS
    assert max(made) <= max(chunk.nbytes for chunk in plan.chunks)
    optimizer.close()


def test_a_failed_step_does_not_spoil_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 2))
    expected = state_of(model, optimizer)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    with monkeypatch.context() as patch:
        fail_update(patch, after=3)
        with pytest.raises(OSError, match="no more"):
            train(model, optimizer, range(2, 3))
    held.may_go.set()
    ticket.wait(WAIT_S)
    offload.load(tmp_path / "c", model, optimizer)
    assert_same_named(state_of(model, optimizer), expected)
    optimizer.close()


def fail_writes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    original, left = shard.Shards.write, [after]

    def write(self: Any, name: str, begin: int, values: Tensor) -> None:
        if "/" in name:  # a tensor of the optimizer
            left[0] -= 1
            if left[0] < 0:
                raise StoreError("no space left", errno=28)
        original(self, name, begin, values)

    monkeypatch.setattr(shard.Shards, "write", write)


def test_a_failed_save_does_not_spoil_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write fails during a step, which goes on; the ticket reports the error."""
    plain, reference = build()
    expected = train(plain, reference, range(0, 6))
    held = Held(monkeypatch)
    model, optimizer = build(**on_disk(tmp_path))
    losses = train(model, optimizer, range(0, 2))
    before = set(tmp_path.iterdir())
    fail_writes(monkeypatch, after=2)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    losses += train(model, optimizer, range(2, 4))
    held.may_go.set()
    with pytest.raises(StoreError, match="no space left"):
        ticket.wait(WAIT_S)
    assert set(tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert losses + train(model, optimizer, range(4, 6)) == expected
    offload.save(tmp_path / "d", model, optimizer)  # the ticket has told of it: no refusal
    optimizer.close()


def test_errors_that_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 1))
    with monkeypatch.context() as patch:
        fail_writes(patch, after=0)
        ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
        del ticket
        with pytest.raises(StateError, match=r"background save of .*c failed.*no space left") as e:
            offload.save(tmp_path / "d", model, optimizer)
    assert isinstance(e.value.__cause__, StoreError)
    assert (
        "no space left"
        in offload.report(optimizer).fallbacks[f"background save of {tmp_path / 'c'}"]
    )
    path = offload.save(tmp_path / "d", model, optimizer)
    offload.load(path, model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("what", ["save", "load", "load_state_dict", "close", "add_param_group"])
def test_what_comes_while_a_save_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The call waits until the background save has ended, and does not disturb it."""
    held = Held(monkeypatch)
    model, optimizer = build(**on_disk(tmp_path))
    train(model, optimizer, range(0, 1))
    held.may_go.set()
    offload.save(tmp_path / "before", model, optimizer)
    train(model, optimizer, range(1, 2))
    given = optimizer.state_dict()
    expected = state_of(model, optimizer)
    held.may_go.clear()
    held.begun.clear()
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    assert held.begun.wait(WAIT_S)
    timer = threading.Timer(0.2, held.may_go.set)  # only it can let the call go on
    timer.start()
    if what == "save":
        offload.save(tmp_path / "d", model, optimizer)
        assert manifest_of(tmp_path / "d").number == manifest_of(tmp_path / "c").number + 1
    elif what == "load":
        offload.load(tmp_path / "before", model, optimizer)
    elif what == "load_state_dict":
        optimizer.load_state_dict(given)
    elif what == "close":
        optimizer.close()
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert held.may_go.is_set()
    timer.join()
    assert ticket.wait(WAIT_S) == tmp_path / "c"
    offload.close(optimizer)
    assert_same_named(loaded(tmp_path / "c"), expected)


def test_closing_a_prepared_model_during_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    offload.prepare(model, optimizer, device="cpu", host_memory=120_000, nvme=tmp_path)
    train(model, optimizer, range(0, 2))
    expected = state_of(model, optimizer)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    offload.close(model)
    ticket.wait(WAIT_S)
    assert_same_named(loaded(tmp_path / "c"), expected)


_AT_EXIT = """
import sys, time, torch, offload
from offload.optim.saver import Saver
run = Saver.run
Saver.run = lambda saver: (time.sleep(0.3), run(saver))[1]
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
offload.wrap(optimizer, nvme=sys.argv[1], host_memory="1MiB")
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
ticket = offload.save(sys.argv[1] + "/c", model, optimizer, background=True)
assert not ticket.done
if sys.argv[2] == "error":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["end", "error"])
def test_a_process_that_ends_finishes_its_save(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", _AT_EXIT, str(tmp_path), how]
    done = children.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (3 if how == "error" else 0), done.stderr
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    offload.load(tmp_path, model, optimizer)
    assert len(optimizer.state_dict()["state"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_plain_optimizer_in_the_background(tmp_path: Path) -> None:
    """All of its state is written during the call, since any code may change it afterwards."""
    model, optimizer = build()
    train(model, optimizer, range(0, 2))
    expected = state_of(model, optimizer)
    ticket = offload.save(tmp_path / "c", model, optimizer, background=True)
    train(model, optimizer, range(2, 4))
    ticket.wait(WAIT_S)
    assert_same_named(loaded(tmp_path / "c"), expected)
