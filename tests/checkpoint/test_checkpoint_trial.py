"""The faults that an independent trial of the checkpoints has found, each as a test."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import same_tensors
from support.leftovers import Handles
from support.models import Gpt
from torch import Tensor, nn

import offload
from offload.checkpoint.format import manifest
from offload.checkpoint.format.verify import verify
from offload.checkpoint.output import Output
from offload.core.errors import ConfigError, CorruptionError, FormatError, StoreError
from offload.storage import native_engine

KILLS = 20


def build(kind: str, swap: Path, seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    if kind == "wrap":
        offload.wrap(optimizer, host_memory="256KiB", nvme=swap)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8, device="cpu")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


# --- loading --------------------------------------------------------------------------------------


class Stubborn:
    """An object that refuses every state but its own."""

    made = itertools.count()  # not id(): it may be reused when its object is freed

    def __init__(self) -> None:
        self.number = next(self.made)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["number"] != self.number:
            raise RuntimeError("another one")


@pytest.mark.parametrize("kind", ["plain", "wrap"])
def test_an_object_that_refuses_leaves_all_others_as_they_were(kind: str, tmp_path: Path) -> None:
    model, optimizer = build("plain", tmp_path)
    train(model, optimizer, 2)
    beside = nn.Linear(2, 2)
    path = offload.save(tmp_path / "c", model, optimizer, beside=beside, scaler=Stubborn())
    model, optimizer = build(kind, tmp_path, seed=1)
    train(model, optimizer)
    scaler, other = Stubborn(), nn.Linear(2, 2)
    before, beside_before, numbers = values(model), values(other), torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"scaler: its load_state_dict .*another one"):
        offload.load(path, model, optimizer, beside=other, scaler=scaler)
    assert same_tensors(values(model), before) and same_tensors(values(other), beside_before)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1.0
    train(model, optimizer)
    offload.close(optimizer)


def test_below_a_directory_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    model, optimizer = build("plain", tmp_path)
    for number in range(1, 4):
        train(model, optimizer)
        offload.save(tmp_path / "c" / f"{number}", model, optimizer, extra=number)
    flip(tmp_path / "c" / "3" / "model-00001.safetensors", -5)
    os.truncate(tmp_path / "c" / "2" / "optimizer-00001.safetensors", 100)
    with pytest.warns(UserWarning, match="passed over") as warned:
        assert offload.load(tmp_path / "c", model, optimizer) == 1
    told = [str(each.message) for each in warned]
    assert len(told) == 2 and "model-00001" in told[0] and "optimizer-00001" in told[1]
    with pytest.raises(CorruptionError, match=r"model-00001"):  # named directly
        offload.load(tmp_path / "c" / "3", model, optimizer)
    flip(tmp_path / "c" / "1" / "model-00001.safetensors", -5)
    before = values(model)
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(FormatError, match=r"no checkpoint there is whole"),
    ):
        offload.load(tmp_path / "c", model, optimizer)
    assert same_tensors(values(model), before)


@pytest.mark.parametrize("kind", ["plain", "wrap"])
def test_a_default_device_changes_nothing(kind: str, tmp_path: Path) -> None:
    model, optimizer = build(kind, tmp_path)
    conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    optimizer.add_param_group({"params": conv.parameters()})
    for param in conv.parameters():
        param.grad = torch.ones_like(param)
    train(model, optimizer, 2)
    extra = torch.ones(2)
    with torch.device("meta"):
        path = offload.save(tmp_path / "c", model, optimizer, conv=conv, extra=extra)
    assert verify(path).is_whole
    other, second = build(kind, tmp_path, seed=1)
    conv2 = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    second.add_param_group({"params": conv2.parameters()})
    with torch.device("meta"):
        extra = offload.load(path, other, second, conv=conv2)
    assert torch.equal(extra, torch.ones(2))
    for each in (model, optimizer), (other, second):
        torch.manual_seed(2)
        train(*each, 2)
    assert same_tensors(values(model), values(other))
    offload.close(optimizer)
    offload.close(second)


@pytest.mark.parametrize("ways", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_an_optimizer_keeps_its_own_way_to_compute(ways: dict[str, bool], tmp_path: Path) -> None:
    model, optimizer = build("plain", tmp_path, **ways)
    if "capturable" not in ways:  # which the CPU cannot step
        train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    path = offload.save(tmp_path / "c", model, optimizer)
    other, second = build("plain", tmp_path, seed=1)
    own = {way: second.param_groups[0][way] for way in ("fused", "foreach", "capturable")}
    offload.load(path, other, second)
    assert {way: second.param_groups[0][way] for way in own} == own
    assert second.param_groups[0]["lr"] == 0.5
    train(other, second)


def test_a_load_in_inference_mode(tmp_path: Path) -> None:
    model, optimizer = build("plain", tmp_path)
    train(model, optimizer)
    path = offload.save(tmp_path / "c", model, optimizer, extra=torch.ones(2))
    other, second = build("plain", tmp_path, seed=1)
    with torch.inference_mode():
        extra = offload.load(path, other, second)
    extra.add_(1)
    train(other, second)


def test_kills_during_a_load_leave_the_checkpoint(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load changes nothing on the disk, and leaves no lock."""
    monkeypatch.setattr("offload.planning.planner.LEAST_CHUNK_NUMEL", 64)
    monkeypatch.setattr("offload.planning.planner.CHUNK_NUMEL", 1024)
    torch.manual_seed(3)
    model: Any = Gpt(layers=1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    offload.save(tmp_path / "saves" / "1", model, optimizer, extra=1)
    begin = time.monotonic()
    offload.load(tmp_path / "saves", model, optimizer)
    load_s = time.monotonic() - begin
    rng = random.Random(seed)
    for _ in range(KILLS):
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                other = Gpt(layers=1)
                second: Any = torch.optim.AdamW(other.parameters(), lr=1e-2)
                offload.wrap(second, host_memory=30_000, nvme=tmp_path)
                os.write(into, b"!")
                while True:
                    offload.load(tmp_path / "saves", other, second)
            finally:
                os._exit(1)
        os.close(into)
        assert os.read(out, 1) == b"!"
        os.close(out)
        time.sleep(rng.uniform(0.0, 2 * load_s))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert os.listdir(tmp_path) == ["saves"] and os.listdir(tmp_path / "saves") == ["1"]
    assert verify(tmp_path / "saves" / "1").is_whole
    assert offload.load(tmp_path / "saves", model, optimizer) == 1
    offload.save(tmp_path / "saves" / "2", model, optimizer, keep=1)  # no process reads the first
    assert os.listdir(tmp_path / "saves") == ["2"]


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "output"])
def test_an_interrupted_save_leaves_no_engine(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the engine is made, and after that before any variable holds it."""
    model, optimizer = build("plain", tmp_path)
    offload.save(tmp_path / "first", model, optimizer)
    before = Handles.now()
    kind: Any = Output if where == "output" else native_engine.NativeEngine
    own = kind.__init__

    def interrupted(self: Any, *args: Any, **options: Any) -> None:
        if where != "before":
            own(self, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kind, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offload.save(tmp_path / "c", model, optimizer)
    before.await_no_others()
    assert os.listdir(tmp_path) == ["first"]


# --- what is refused ------------------------------------------------------------------------------


def test_tensors_that_could_not_be_loaded_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    with pytest.raises(ConfigError, match=r"mask: several elements share one place"):
        offload.save(tmp_path / "c", model)
    with pytest.raises(ConfigError, match=r"weight: is lazy and has no shape yet"):
        offload.save(tmp_path / "c", nn.LazyLinear(3))
    assert not os.listdir(tmp_path)
    model = nn.Linear(2, 2)
    offload.save(tmp_path / "c", model, extra=torch.ones(1).expand(3))
    assert torch.equal(offload.load(tmp_path / "c", model), torch.ones(3))
    with pytest.raises(ConfigError, match=r"weight: is lazy"):
        offload.load(tmp_path / "c", nn.LazyLinear(2))


def test_extras_that_cannot_be_saved_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    own: list[Any] = []
    own.append({"again": own})
    for extra, told in ((own, "does it hold itself"), (list(range(1_100_000)), "use a tensor")):
        with pytest.raises(ConfigError, match=told):
            offload.save(tmp_path / "c", model, extra=extra)
    assert not os.listdir(tmp_path)


def test_a_limit_of_the_shell_is_named(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(StoreError, match=r"EFBIG.*`ulimit -f`") as caught:
            offload.save(tmp_path / "c", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG and not os.listdir(tmp_path)


def test_a_native_core_of_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stale: Any = SimpleNamespace(__file__="stale.so", isas=lambda: [])
    monkeypatch.setitem(sys.modules, "offload._native", stale)
    monkeypatch.setattr(offload, "_native", stale, raising=False)
    with pytest.raises(ConfigError, match=r"stale.so was built by another version.*build it again"):
        manifest._choose.__wrapped__()
