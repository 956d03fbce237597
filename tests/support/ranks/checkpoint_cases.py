"""Programs of each rank in the tests of checkpoints: functions that `launch` calls in processes."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offload
from offload.checkpoint import draft, rank_group, writer
from offload.checkpoint.disk import CheckpointDisk
from offload.checkpoint.format.verify import verify
from offload.core.metrics import Metrics
from support.disk_doubles import FaultyDisk


class Net(nn.Module):
    """A model with odd sizes, so that ranks share blocks of a file; a weight in another order of
    memory; a buffer that may differ over ranks; a frozen parameter.
    """

    def __init__(self, order: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        self.first = nn.Linear(37, 211)
        self.conv = nn.Conv2d(3, 77, 3).to(memory_format=order)
        self.norm = nn.BatchNorm1d(211)
        self.last = nn.Linear(211, 13, bias=False)
        self.frozen = nn.Parameter(torch.randn(1001), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :27].reshape(-1, 3, 3, 3)
        return self.last(self.norm(self.first(x))).sum() * self.scalar + self.conv(image).sum()


def build(kind: str = "plain", seed: int = 3, folder: Path | None = None) -> tuple[Any, Any]:
    """Build a model and its optimizer.

    kind: plain; wrap, with stage 1 among ranks; reduce, with stage 2; prepare, with stage 3;
    straight, a plain model in the memory order of a prepared one.
    folder: of a swap file, which a wrapped optimizer gets if `seed` is even.
    """
    torch.manual_seed(seed)
    straight = kind in ("prepare", "straight")  # prepared models have no other order
    model = Net(torch.contiguous_format if straight else torch.channels_last)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    where: dict[str, Any] = {}
    if folder is not None and seed % 2 == 0:
        where = {"host_memory": 400_000, "nvme": folder}
    if kind == "wrap":
        optimizer = offload.wrap(optimizer, **where)
    elif kind == "reduce":
        many = dist.is_initialized() and dist.get_world_size() > 1
        optimizer = offload.wrap(optimizer, **({"release_grads": True} if many else {}))
    elif kind == "prepare":
        model, optimizer = offload.prepare(model, optimizer, device="cpu")
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Train on the same batches on all ranks, so that all have the same gradients."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 37, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(model: nn.Module, optimizer: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            found.update(f"{number}/{key}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def caught(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and the text of the error that `act` raises; empty if it raises none."""
    try:
        act()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- the cases ------------------------------------------------------------------------------------


def same_bytes(rank: int, folder: Path, kind: str) -> dict[str, Any]:
    """Train and save on all ranks; return the path, the bytes this rank wrote and the digest."""
    model, optimizer = build(kind)
    train(model, optimizer, range(3))
    model.norm.running_mean += rank  # that of rank 0 is saved
    counts: list[int] = []
    count = Metrics.count

    def note(self: Any, name: str, value: int = 1) -> None:
        if name == "checkpoint_written_bytes":
            counts.append(value)
        count(self, name, value)

    Metrics.count = note  # type: ignore[method-assign]
    path = offload.save(folder / "all", model, optimizer, extra={"rank": rank}, keep=3)
    return {"path": str(path), "written": counts[0], "digest": digest(model, optimizer)}


def resume(
    rank: int, count: int, folder: Path, kind: str, steps: range, background: bool
) -> dict[str, Any]:
    """Load unless the steps begin at 0, train, save."""
    model, optimizer = build(kind, seed=8 if steps.start else 3)  # loading must bring the bits
    torch.manual_seed(100 + rank)
    found = None
    if steps.start:
        found = offload.load(folder, model, optimizer)
        assert found == {"step": steps.start}, found
    drawn = torch.rand(()).item()
    train(model, optimizer, steps)
    torch.manual_seed(1000 * count + rank)
    path = folder / f"{steps.stop}"
    saved = offload.save(
        path, model, optimizer, extra={"step": steps.stop}, keep=2, background=background
    )
    before = digest(model, optimizer)
    if background:
        train(model, optimizer, range(50, 53))
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [count] * 3
        assert saved.wait(60) == path
    return {"digest": before, "drawn": drawn}


def arguments_that_differ(rank: int, folder: Path) -> None:
    """Check that every refusal is raised on all ranks, writes nothing, and that a save after it
    succeeds.
    """
    rank_group.ARRIVAL_S = 1.0
    model, optimizer = build()
    train(model, optimizer, range(2))

    def refused(what: str, text: str, act: Callable[[], Any], kinds: tuple[str, ...]) -> None:
        kind, message = caught(act)
        assert kind in kinds and text in message, (what, rank, kind, message)
        dist.barrier()
        assert not folder.exists() or listed(folder) in ([], ["good"]), (what, listed(folder))

    def save(path: str = "x", **options: Any) -> Any:
        return offload.save(folder / path, model, options.pop("optimizer", optimizer), **options)

    begin = time.monotonic()
    if rank == 0:
        kind, message = caught(save)
        assert kind == "StateError" and "call it on every rank" in message, message
        assert "rank 1" in message and time.monotonic() - begin < 20
    dist.barrier()
    refused("path", f"x{1 - rank}", lambda: save(f"x{rank}"), ("StateError",))
    refused("keep", "differ in keep (2 and 1)", lambda: save(keep=rank + 1), ("ConfigError",))
    other = torch.optim.SGD(model.parameters(), lr=1.0) if rank == 1 else optimizer
    refused("optimizer", "not there", lambda: save(optimizer=other), ("ConfigError",))
    optimizer.param_groups[0]["lr"] = 0.5 if rank == 1 else 0.25
    refused("lr", "settings", save, ("ConfigError",))
    optimizer.param_groups[0]["lr"] = 0.25
    with torch.no_grad():
        model.last.weight[0, 0] += rank
        refused("values", "last.weight", save, ("ConfigError",))
        model.last.weight[0, 0] -= rank
        model.last.weight[0, 0] = 1.0
    wrong = {1: object()}.get(rank, 1)  # one rank cannot save what it is given
    kinds = ("ConfigError",)
    refused(
        "extra",
        "extra" if rank == 1 else "rank 1 failed, so no rank",
        lambda: save(extra=wrong),
        kinds,
    )
    assert save("good") == folder / "good"
    refused("again", "is there already", lambda: save("good"), kinds)
    assert verify(folder / "good").is_whole
    # Loads: one rank's model does not fit, and no rank's is changed.
    before = digest(model, optimizer)
    if rank == 1:
        model.more = nn.Parameter(torch.zeros(2))
    kind, message = caught(lambda: offload.load(folder, model, optimizer))
    assert kind == "ConfigError" and "more" in message, (kind, message)
    if rank == 1:
        del model.more
    assert digest(model, optimizer) == before
    assert offload.load(folder, model, optimizer) is None
    # A byte that one rank reads is wrong, and all ranks raise.
    if rank == 0:
        file = folder / "good" / "optimizer-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    dist.barrier()
    train(model, optimizer, range(2, 3))
    before = digest(model, optimizer)
    kind, message = caught(lambda: offload.load(folder / "good", model, optimizer))
    assert "CRC-32" in message, message
    assert kind == "CorruptionError"
    assert ("no rank continues" in message) == (rank != dist.get_world_size() - 1)
    assert digest(model, optimizer) == before


def faults(rank: int, folder: Path, victim: int, stride: int) -> dict[str, int]:
    """Have each call to the disk of one rank's save fail once; count them by operation."""
    model, optimizer = build()
    train(model, optimizer, range(2))
    offload.save(folder / "first", model, optimizer, keep=2)
    before = digest(model, optimizer)
    disks: list[FaultyDisk] = []
    nth = 0

    def make() -> CheckpointDisk:
        disks.append(FaultyDisk(nth=nth if rank == victim else 0))
        return disks[-1]

    writer.CheckpointDisk = draft.CheckpointDisk = make  # type: ignore[assignment,misc]
    seen: dict[str, int] = {}
    offload.save(folder / "second", model, optimizer)
    calls = [len(disks[-1].calls)]
    dist.broadcast_object_list(calls, victim)
    for nth in range(1, calls[0] + 1, stride):
        code = ("StoreError", "StateError", "CorruptionError")
        kind, message = caught(lambda: offload.save(folder / "bad", model, optimizer, keep=9))
        dist.barrier()
        failed = disks[-1].failed
        failures = [failed and list(failed)]
        dist.broadcast_object_list(failures, victim)
        operation, file = failures[0] or ("", "")
        seen[operation] = seen.get(operation, 0) + 1
        assert kind in code, (nth, operation, file, kind, message)
        if rank == victim:
            assert kind != "StateError" or "saved, but" in message, (kind, message)
        else:
            assert f"rank {victim}" in message, message
        assert listed(folder) == ["first", "second"], (nth, operation, file, listed(folder))
        assert digest(model, optimizer) == before
    assert verify(folder / "first").is_whole and verify(folder / "second").is_whole
    nth = 0
    offload.save(folder / "good", model, optimizer, keep=1)
    assert listed(folder) == ["good"]
    assert verify(folder / "good").is_whole
    return seen


class _Killer(CheckpointDisk):
    point = ""

    def hook(self, point: str) -> None:
        if point == _Killer.point:
            os.kill(os.getpid(), signal.SIGKILL)


def kill(
    rank: int, folder: Path, victim: int, point: str, delay_s: float, background: bool
) -> dict[str, Any]:
    """Kill one rank while all save, at a point or after a while; return what the others see."""
    writer.CheckpointDisk = draft.CheckpointDisk = _Killer  # type: ignore[misc]
    rank_group.ARRIVAL_S = 5.0  # for a rank that is killed before it arrives
    model, optimizer = build()
    train(model, optimizer, range(2))
    offload.save(folder / "1", model, optimizer, keep=2)
    before = digest(model, optimizer)
    if rank == victim:
        _Killer.point = point
        if not point:
            act = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            act.daemon = True
            act.start()
    saved, begin, error = 1, time.monotonic(), ("", "")
    while saved < 1000 and not error[0]:
        begin = time.monotonic()

        def save(number: int = saved + 1) -> None:
            done = offload.save(
                folder / f"{number}", model, optimizer, keep=2, background=background
            )
            if background:
                done.wait(60)

        error = caught(save)
        saved += not error[0]
    took_s = time.monotonic() - begin
    assert digest(model, optimizer) == before
    return {"saved": saved, "error": error, "took_s": took_s}


class _Stopper(CheckpointDisk):
    point = ""

    def hook(self, point: str) -> None:
        if point == _Stopper.point:
            _Stopper.point = ""
            os.kill(os.getpid(), signal.SIGSTOP)


def stop(rank: int, folder: Path, victim: int, limit_s: float) -> dict[str, Any]:
    """Stop one rank while all save; it continues when the saves of the others have ended."""
    writer.CheckpointDisk = draft.CheckpointDisk = _Stopper  # type: ignore[misc]
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    torch.manual_seed(3)
    model = Net(torch.contiguous_format)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    offload.wrap(optimizer, process_group=group)
    train(model, optimizer, range(1))
    offload.save(folder / "1", model, optimizer)
    if rank == victim:
        _Stopper.point = "data written"
    begin_s = time.monotonic()
    error = caught(lambda: offload.save(folder / "2", model, optimizer))
    took_s = time.monotonic() - begin_s
    if rank != victim:
        os.kill(pids[victim], signal.SIGCONT)
    return {"error": error, "took_s": took_s}


def signalled(rank: int, folder: Path, number: int, victim: int) -> dict[str, Any]:
    """Signal one rank in the middle of a step; all save at the same step."""
    model, optimizer = build()
    steps, seen = 0, {}
    with offload.save_on_signal(
        folder / "at", model, optimizer, signals=(number,), extra=lambda: {"step": steps + 1}
    ):
        try:
            while steps < 12:
                if rank == victim and steps == 4:
                    os.kill(os.getpid(), number)
                dist.barrier()  # as gradients that are averaged
                train(model, optimizer, range(steps, steps + 1))
                steps += 1
                seen[steps] = digest(model, optimizer)
        except SystemExit as error:
            assert error.code == 128 + number
            steps += 1  # the save was within it
    return {"steps": steps, "digests": seen, "listed": listed(folder)}


def without_one_another(rank: int, folder: Path) -> int:
    """Run loops that never wait for each other, and signal the rank that is behind.

    It must go on to the step of the other before both save. Returns the number of steps.
    """
    model, optimizer = build()
    steps = 0
    with offload.save_on_signal(
        folder / "at",
        model,
        optimizer,
        signals=(signal.SIGUSR1,),
        extra=lambda: {"step": steps + 1},
    ):
        if rank == 0:
            train(model, optimizer, range(6))
            steps = 6
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        while steps < 20 and not (folder / "at").exists():
            train(model, optimizer, range(steps, steps + 1))
            steps += 1
            if rank == 0:
                time.sleep(0.05)
    return steps


# --- parameters that are sharded over ranks -------------------------------------------------------


def build_sharded(kind: str, replicas: int = 1) -> tuple[nn.Module, Any]:
    """Build a model with FSDP2: ranks have uneven shards of rows, and some have none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(37, 211), nn.Tanh(), nn.Linear(211, 13), nn.Linear(13, 2))
    shards = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("copies", "rows"))
    for each in (*model, model):
        fully_shard(each, mesh=mesh if replicas > 1 else mesh["rows"])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "wrap":
        optimizer = offload.wrap(optimizer)
    return model, optimizer


def train_sharded(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 37, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return all values, gathered, as one process would have them."""
    found = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    names = [name for name, _ in model.named_parameters()]
    for number, state in optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{names[number]}/{key}"] = state[key].full_tensor().numpy()
    return found


def sharded(rank: int, folder: Path, kind: str, replicas: int, loads: bool) -> dict[str, Any]:
    model, optimizer = build_sharded(kind, replicas)
    if loads:
        assert offload.load(folder, model, optimizer) == {"step": 3}
        loaded = wholes(model, optimizer)
        train_sharded(model, optimizer, range(3, 5))
        return {"loaded": loaded, "later": wholes(model, optimizer)}
    train_sharded(model, optimizer, range(3))
    offload.save(folder / "all", model, optimizer, extra={"step": 3}, keep=1)
    saved = wholes(model, optimizer)
    train_sharded(model, optimizer, range(3, 5))
    return {"saved": saved, "later": wholes(model, optimizer)}


def sharded_and_back(
    rank: int, folder: Path, kind: str, replicas: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save, and then load into a new model."""
    first = sharded(rank, folder, kind, replicas, loads=False)
    return first, sharded(rank, folder, kind, replicas, loads=True)
