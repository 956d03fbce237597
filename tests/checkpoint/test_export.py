"""`offload export`, and plain state_dicts in both directions."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.models import Gpt
from support.training import train

import offload
from offload.checkpoint import exporting, tensors
from offload.checkpoint.format.values import encode
from offload.checkpoint.optimizer import OptimizerContents
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.writer import CheckpointWriter
from offload.core.errors import CorruptionError, FormatError, StoreError
from offload.params import units
from offload.planning import planner
from offload.tools.cli import main

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)


def build(kind: str, swap: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Gpt(layers=2).to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if kind == "wrap":
        offload.wrap(optimizer, host_memory=60_000, nvme=swap)
    elif kind == "prepare":
        offload.prepare(model, optimizer, device="cpu", host_memory=200_000, nvme=swap)
    return model, optimizer


def close(model: Any, optimizer: Any) -> None:
    offload.close(model)
    offload.close(optimizer)


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
def test_a_plain_training_goes_on_from_an_export(kind: str, tmp_path: Path) -> None:
    """Hugging Face's safetensors reads the model, torch.load with `weights_only` the optimizer."""
    model, optimizer = build(kind, tmp_path)
    train(model, optimizer, range(0, 3))
    offload.save(tmp_path / "saves" / "3", model, optimizer)
    names = list(model.state_dict())
    expected = train(model, optimizer, range(3, 8))
    close(model, optimizer)
    out, file = tmp_path / "model", tmp_path / "optimizer.pt"
    assert main(["export", str(tmp_path / "saves"), str(out), "--optimizer", str(file)]) == 0
    tensors = safetensors.load_file(out / "model.safetensors")
    assert sorted([*tensors, "head.weight"]) == sorted(names)  # tied: stored once
    plain, own = build("plain", tmp_path)
    assert plain.load_state_dict(tensors, strict=False).missing_keys == ["head.weight"]
    own.load_state_dict(torch.load(file, weights_only=True))
    assert train(plain, own, range(3, 8)) == expected
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".", "tmp"))]


def conv(seed: int) -> tuple[Any, Any]:
    """Make a model and its optimizer, with parameters in several memory orders."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.Conv3d(2, 3, 2))
    model[0].to(memory_format=torch.channels_last)
    model.turned = torch.nn.Parameter(torch.randn(5, 7).t())
    model[1].weight.data = (
        model[1].weight.data.permute(4, 0, 2, 1, 3).contiguous().permute(1, 3, 2, 4, 0)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step_of_conv(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        noise = torch.randn(param.shape)
        param.grad = torch.empty_strided(param.shape, param.stride()).copy_(noise)
    optimizer.step()


@pytest.mark.parametrize("kind", ["plain", "wrap"])
def test_moments_are_exported_in_their_parameters_order_of_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused steps go through memory and ignore strides, so the orders must be the same."""
    monkeypatch.setattr(tensors, "PIECE_BYTES", 64)
    model, optimizer = conv(0)
    if kind == "wrap":
        offload.wrap(optimizer, host_memory="1MiB", nvme=tmp_path)
    for _ in range(2):
        step_of_conv(model, optimizer)
    offload.save(tmp_path / "c", model, optimizer)
    file = tmp_path / "o.pt"
    out = [str(tmp_path / "c"), str(tmp_path / "out"), "--optimizer", str(file)]
    assert main(["export", *out]) == 0
    plain, own = conv(1)
    plain.load_state_dict(model.state_dict())
    own.load_state_dict(torch.load(file, weights_only=True))
    for each in (model, optimizer), (plain, own):
        torch.manual_seed(5)
        step_of_conv(*each)
    for name, param in plain.named_parameters():
        assert torch.equal(param, model.get_parameter(name)), name
    offload.close(optimizer)


def test_an_old_checkpoint_without_orders_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = conv(0)
    step_of_conv(model, optimizer)
    offload.save(tmp_path / "new", model, optimizer)
    own = OptimizerContents.look

    def look(self: OptimizerContents, rank_group: Any) -> Any:
        fields, values = own(self, rank_group)
        del values["orders"]
        return fields, values

    monkeypatch.setattr(OptimizerContents, "look", look)
    offload.save(tmp_path / "old", model, optimizer)
    for name in ("new", "old"):
        offload.load(tmp_path / name, model, optimizer)
        out = [str(tmp_path / name), str(tmp_path / f"{name}-out")]
        assert main(["export", *out, "--optimizer", str(tmp_path / f"{name}.pt")]) == 0
        assert ("0.weight and others" in capsys.readouterr().err) == (name == "old")


def test_shards_have_an_index_and_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = build("wrap", tmp_path, torch.bfloat16)
    train(model, optimizer, range(0, 2))
    offload.save(tmp_path / "c", model, optimizer)
    command = ["export", str(tmp_path / "c"), str(tmp_path / "out"), "--max-shard-size", "4KiB"]
    assert main(command) == 0
    index = json.loads((tmp_path / "out" / exporting.INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    found = {}
    for name in files:
        tensors = safetensors.load_file(tmp_path / "out" / name)
        assert {index["weight_map"][key] for key in tensors} == {name}
        found |= tensors
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    assert {*found, "head.weight"} == set(state)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    # `prepare` reads the exported files.
    with torch.device("meta"):
        other: Any = Gpt(layers=2).to(torch.bfloat16)
    other.head.weight = other.embedding.weight
    offload.prepare(other, weights=tmp_path / "out", host_memory="1MiB")
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    close(other, optimizer)


def test_a_refusal_of_the_checkpoint_keeps_its_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = build("plain", tmp_path)
    offload.save(tmp_path / "c", model, optimizer)
    damaged = CorruptionError("w: other bytes than were saved", errno=errno.EBADMSG)
    monkeypatch.setattr(exporting, "optimizer_state", Mock(side_effect=damaged))
    command = ["export", str(tmp_path / "c"), str(tmp_path / "out")]
    assert main([*command, "--optimizer", str(tmp_path / "o.pt")]) == 2
    assert "w: other bytes than were saved" in capsys.readouterr().err


def test_an_optimizer_that_no_save_has_written_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "c")
    writer.open_section("model", [])
    writer.commit({"model": encode({}, None), "optimizer": [1, 2]}, "f" * 16)
    refused = pytest.raises(FormatError, match="not as a save writes it")
    with CheckpointReader(tmp_path / "c") as reader, refused:
        exporting.optimizer_state(reader, tmp_path)


def test_plain_states_go_in_and_out(tmp_path: Path) -> None:
    """`load` is for checkpoints; what torch.save has written is loaded by `load_state_dict`."""
    plain, own = build("plain", tmp_path)
    train(plain, own, range(0, 3))
    torch.save([plain.state_dict(), own.state_dict()], tmp_path / "plain.pt")
    expected = train(plain, own, range(3, 6))
    for kind in ("wrap", "prepare"):
        model, optimizer = build(kind, tmp_path)
        states = torch.load(tmp_path / "plain.pt", weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        assert train(model, optimizer, range(3, 6)) == expected
        close(model, optimizer)


def test_mistakes_and_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build("plain", tmp_path)
    train(model, optimizer, range(0, 1))
    path = offload.save(tmp_path / "c", model, optimizer)
    (tmp_path / "there").mkdir()
    (tmp_path / "there.pt").touch()
    out = str(tmp_path / "out")
    for wrong in (
        [str(path), str(tmp_path / "there")],
        [str(path), out, "--optimizer", str(tmp_path / "there.pt")],
        [str(path), out, "--max-shard-size", "many"],
        [str(tmp_path / "nowhere"), out],
        [str(path), out, "--optimizer", str(tmp_path / "nowhere" / "a.pt")],
        [str(path), out, "--optimizer", str(tmp_path / "out" / "a.pt")],
    ):
        assert main(["export", *wrong]) == 2
        assert "offload: error: " in capsys.readouterr().err
    with open(path / "model-00001.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"\x55\xaa")
    assert main(["export", str(path), out]) == 2
    assert "model-00001.safetensors" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["c", "there", "there.pt"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build("plain", tmp_path)
    train(model, optimizer, range(0, 1))
    path = offload.save(tmp_path / "c", model, optimizer)

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with exporting.CheckpointReader(path) as reader, monkeypatch.context() as patched:
        patched.setattr(exporting.os, "fsync", refuse)
        with pytest.raises(StoreError, match="ENOSPC"):
            exporting.export_model(reader, tmp_path / "out", 1 << 30)
    assert os.listdir(tmp_path) == ["c"]


def test_export_needs_little_memory(tmp_path: Path) -> None:
    """The export takes far less memory than the checkpoint has bytes."""
    model = torch.nn.Linear(4096, 8192)  # 128 MiB, and moments twice as large
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    offload.save(tmp_path / "c", model, optimizer)
    program = (
        "import resource, sys, torch\n"
        "import offload.checkpoint.exporting\n"
        "from offload.tools.cli import main\n"
        "def anonymous(): return int([l for l in open('/proc/self/status') "
        "if l.startswith('RssAnon')][0].split()[1]) << 10\n"
        "import threading, time\n"
        "most, ended, before = [0], [], anonymous()\n"
        "def watch():\n"
        "    while not ended: most[0] = max(most[0], anonymous()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "try: code = main(['export', *sys.argv[1:]])\n"
        "finally: ended.append(1); thread.join()\n"
        "print(code, most[0] - before)\n"
    )
    files = [str(tmp_path / name) for name in ("c", "out", "o.pt")]
    done = subprocess.run(
        [sys.executable, "-c", program, *files[:2], "--optimizer", files[2]],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    code, nbytes = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0, done.stderr
    assert nbytes < 100 << 20
