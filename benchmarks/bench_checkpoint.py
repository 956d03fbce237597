"""Saving 4 GiB of optimizer state that lies on NVMe: `make bench ONLY=checkpoint`, or pytest
benchmarks/bench_checkpoint.py.

Ours reads the state from the drive and writes it to a checkpoint there, with the bf16 parameters.
Beside it, in the same rounds: fio, which reads and writes as many bytes at the same time;
torch.save and torch.distributed.checkpoint, which have the same tensors in memory and need not read
them. Every contestant syncs. A second test steps with and without a background save.

OFFLOAD_BENCH_CHECKPOINT_GB: GiB of state. OFFLOAD_BENCH_ROUNDS, OFFLOAD_BENCH_DIR as elsewhere.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_results import BackgroundRow, CheckpointResults, SaveRow
from contest import rounds
from disk_contest import MI, PASSES, DiskContestant, Fio, Run, hold, timed
from torch import nn

import offload

GI = 1 << 30
WIDTH = 4096
FIELD_BYTES = 4  # of each of master, exp_avg, exp_avg_sq
HOST_BYTES = 512 * MI
FIO_BLOCK_BYTES = 4 * MI
ALONE = 3  # steps without a save, in each round


def state_bytes() -> int:
    return int(float(os.environ.get("OFFLOAD_BENCH_CHECKPOINT_GB") or 4) * GI)


@dataclass
class Training:
    """A model of bf16 parameters whose state is on the drive. No forward: gradients are constant,
    so that a step is nothing but the update, and as fast as the drive.
    """

    directory: Path
    saves: Path = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        layers = max(1, state_bytes() // (3 * FIELD_BYTES * WIDTH * WIDTH))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.model = model.to_empty(device="cpu").to(torch.bfloat16)
        for param in self.model.parameters():
            nn.init.normal_(param, std=0.02)
            param.grad = torch.full_like(param, 1e-3)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.optimizer: Any = offload.wrap(optimizer, host_memory=HOST_BYTES, nvme=self.directory)
        self.optimizer.step()
        self.saves = self.directory / "saves.bench.d"
        shutil.rmtree(self.saves, ignore_errors=True)
        self.saves.mkdir()

    @property
    def model_bytes(self) -> int:
        return sum(param.nbytes for param in self.model.parameters())

    @property
    def disk_bytes(self) -> int:
        """The bytes of state on disk, which a save reads."""
        return int(offload.report(self.optimizer).plan.disk_bytes)

    @property
    def moved_bytes(self) -> int:
        """The bytes that the whole save reads and writes."""
        return self.disk_bytes + self.written_bytes

    @property
    def written_bytes(self) -> int:
        """The bytes of a checkpoint: parameters of two bytes each, and their state fields."""
        return self.model_bytes * (1 + 3 * FIELD_BYTES // 2)

    def next_path(self) -> Path:
        self.count += 1
        return self.saves / f"{self.count}"

    def step_s(self) -> float:
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin

    def close(self) -> None:
        self.optimizer.close()
        shutil.rmtree(self.saves)


@pytest.fixture(scope="module")
def training(bench_directory: Path) -> Iterator[Training]:
    needed = 4 * state_bytes()
    free = shutil.disk_usage(bench_directory).free
    assert free > needed, f"{bench_directory}: {free} bytes are free, {needed} are needed"
    found = Training(bench_directory)
    yield found
    found.close()


# --- memory ---------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A contestant, with the memory that its run takes beyond what the process has before."""

    name: str
    work: Callable[[Path], object]
    nbytes: int
    training: Training
    extra_bytes: list[int] = field(default_factory=list)

    def run(self) -> Run:
        path = self.training.next_path()
        before = _forget_peak()
        run = timed(lambda: self.work(path), self.nbytes)
        self.extra_bytes.append(_status_bytes("VmHWM") - before)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return run


def _forget_peak() -> int:
    """Reset the peak of this process's resident bytes; return what they are now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/self/status has no {name}")


# --- the contest ----------------------------------------------------------------------------------


def sync(path: Path) -> None:
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())


def in_memory(training: Training) -> dict[str, Any]:
    """Return the same tensors, for the contestants that need them in memory."""
    found = dict(training.model.state_dict())
    for number, state in training.optimizer.state_dict()["state"].items():
        found |= {f"state.{number}.{name}": value.clone() for name, value in state.items()}
    return found


def save_by_torch(tensors: dict[str, Any], path: Path) -> None:
    torch.save(tensors, path)
    sync(path)


def save_by_dcp(tensors: dict[str, Any], path: Path) -> None:
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        checkpoint.save(tensors, storage_writer=checkpoint.FileSystemWriter(path), no_dist=True)
    sync(path)


def test_save(benchmark: Any, checkpoint_results: CheckpointResults, training: Training) -> None:
    moved, model, optimizer = training.moved_bytes, training.model, training.optimizer
    written = training.written_bytes
    tensors = in_memory(training)
    works: list[tuple[str, Callable[[Path], object], int]] = [
        ("offload", lambda path: offload.save(path, model, optimizer), moved),
        (
            "offload, read back (keep=1)",
            lambda path: offload.save(path / "c", model, optimizer, keep=1),
            moved + written,
        ),
        ("torch.save", lambda path: save_by_torch(tensors, path), written),
        ("torch.distributed.checkpoint", lambda path: save_by_dcp(tensors, path), written),
    ]
    watched = [Watched(name, work, nbytes, training) for name, work, nbytes in works]
    size = max(64 * MI, moved // PASSES // FIO_BLOCK_BYTES * FIO_BLOCK_BYTES)
    fio = Fio(training.directory, size)
    measure = DiskContestant("fio", lambda: fio.run("mixed", FIO_BLOCK_BYTES))
    contestants = [DiskContestant(each.name, each.run) for each in watched]
    try:
        benchmark.pedantic(lambda: hold([*contestants, measure], rounds(5)), rounds=1)
    finally:
        fio.close()
    checkpoint_results.saves += [
        SaveRow.of(contestant, measure, each.extra_bytes)
        for contestant, each in zip(contestants, watched, strict=True)
    ]
    checkpoint_results.saves.append(SaveRow.of(measure, measure, []))


def test_background_save(checkpoint_results: CheckpointResults, training: Training) -> None:
    """Steps alone, steps that a background save overlaps, and a save alone, in turn."""
    for _ in range(rounds(5)):
        moved = _moved_bytes()
        alone = [training.step_s() for _ in range(ALONE)]
        step_bytes = (_moved_bytes() - moved) / ALONE
        begin = time.perf_counter()
        path = training.next_path()
        ticket = offload.save(path, training.model, training.optimizer, background=True)
        held_s = time.perf_counter() - begin
        moved, overlapped = _moved_bytes(), []
        while not ticket.done:
            overlapped.append(training.step_s())
        moved = _moved_bytes() - moved
        ticket.wait()
        save_s = time.perf_counter() - begin
        shutil.rmtree(path)
        assert overlapped, "the save ended before any step: take a larger state"
        begin, path = time.perf_counter(), training.next_path()
        offload.save(path, training.model, training.optimizer)
        foreground_s = time.perf_counter() - begin
        shutil.rmtree(path)
        checkpoint_results.background.append(
            BackgroundRow(
                statistics.mean(alone),
                statistics.mean(overlapped),
                len(overlapped),
                held_s,
                save_s,
                foreground_s,
                moved / (len(overlapped) * step_bytes),
            )
        )


def _moved_bytes() -> int:
    """Return the bytes to and from the drive by this process so far, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(count) for name, count in (line.split(": ") for line in lines)}
    return counts["read_bytes"] + counts["write_bytes"]
