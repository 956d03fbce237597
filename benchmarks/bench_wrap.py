"""A wrapped optimizer in a training step, beside plain torch and DeepSpeed: `make bench ONLY=wrap`,
or pytest benchmarks/bench_wrap.py.

A GPT of 168 M parameters on 128 tokens a step, clipped. Every contestant is a process of its own
and runs a few steps by turns. OFFLOAD_BENCH_ROUNDS changes the number of turns, OFFLOAD_BENCH_DIR
the directory for what is on disk, OFFLOAD_BENCH_LAYERS the size of the model (for a try).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from contest import rounds
from wrap_contest import Entry, Sitting, sit
from wrap_results import ALONE, DEEPSPEED, HOST, NVME, TORCH

MI = 1 << 20
BUDGET = 320 * MI  # buffers, and a sixteenth of the bf16 state; the rest is on disk
FIO_BYTES = 1024 * MI
# Tiles small enough that reads, updates and writes of several overlap, and memory that its I/O
# takes without a copy; the rest is what its own sweep of drives prefers.
TUNED_ZERO = {"sub_group_size": 20_000_000}
TUNED_OPTIMIZER = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
TUNED_AIO = {
    "block_size": MI,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
TUNED_ENVIRONMENT = {"DS_PIN_MEMORY_BACKEND": "native"}


def task(dtype: str, tokens: int = 128) -> dict[str, Any]:
    layers = int(os.environ.get("OFFLOAD_BENCH_LAYERS") or 12)
    return {"dtype": dtype, "layers": layers, "tokens": tokens}


def torch_entry(dtype: str) -> Entry:
    return Entry(TORCH, "torch", {"task": task(dtype)})


def host_entry(dtype: str) -> Entry:
    return Entry(HOST, "offload", {"task": task(dtype)})


def disk_entry(dtype: str, directory: Path) -> Entry:
    place = {"host_memory": BUDGET, "nvme": str(directory)}
    return Entry(NVME, "offload", {"task": task(dtype), **place})


def deepspeed_entries(device: str, directory: Path, tokens: int = 128) -> list[Entry]:
    """Make DeepSpeed's entries: with its defaults, and tuned."""
    optimizer: dict[str, Any] = {"device": device}
    if device == "nvme":
        optimizer["nvme_path"] = str(directory / "deepspeed")
    default = {"task": task("bfloat16", tokens), "optimizer": optimizer}
    tuned = {**default, "zero": TUNED_ZERO}
    if device == "nvme":
        optimizer = {**optimizer, **TUNED_OPTIMIZER, "nvme_path": str(directory / "tuned")}
        tuned |= {"optimizer": optimizer, "aio": TUNED_AIO}
    return [
        Entry(f"{DEEPSPEED[device]}, default", "deepspeed", default),
        Entry(f"{DEEPSPEED[device]}, tuned", "deepspeed", tuned, TUNED_ENVIRONMENT),
    ]


def check_losses(sitting: Sitting) -> None:
    """Check that the losses have the same bits wherever the state is; with fp32 parameters, also
    without wrapping.
    """
    names = (HOST, NVME, TORCH) if sitting.what.startswith("fp32") else (HOST, NVME)
    found = [runner for runner in sitting.runners if runner.name in names]
    for runner in found[1:]:
        assert [s.loss for s in runner.steps] == [s.loss for s in found[0].steps], runner.name


@pytest.mark.parametrize("what", ["bf16, state in memory", "bf16, state on NVMe", "fp32"])
def test_steps(benchmark: Any, wrap_table: list[Sitting], directory: Path, what: str) -> None:
    """All contestants by turns, in one sitting."""
    dtype = "float32" if what == "fp32" else "bfloat16"
    entries = [host_entry(dtype)]
    if what != "bf16, state on NVMe":
        entries.append(torch_entry(dtype))
    if what == "bf16, state in memory":
        entries += deepspeed_entries("cpu", directory)
    else:
        entries.append(disk_entry(dtype, directory))
    if what == "bf16, state on NVMe":
        entries += deepspeed_entries("nvme", directory)
    fio_bytes = 0 if what == "bf16, state in memory" else FIO_BYTES
    sitting = benchmark.pedantic(
        lambda: sit(what, entries, directory, rounds(10), fio_bytes), rounds=1
    )
    check_losses(sitting)
    wrap_table.append(sitting)


def test_alone(benchmark: Any, wrap_table: list[Sitting], directory: Path) -> None:
    """One contestant after the other, alone in memory: how much of it each takes."""
    entries = [torch_entry("bfloat16"), host_entry("bfloat16"), disk_entry("bfloat16", directory)]
    entries += deepspeed_entries("cpu", directory) + deepspeed_entries("nvme", directory)
    whole = Sitting(ALONE, [], {})

    def run() -> None:
        for entry in entries:
            one = sit(ALONE, [entry], directory, 2)
            whole.runners += one.runners
            whole.absent |= one.absent

    benchmark.pedantic(run, rounds=1)
    wrap_table.append(whole)
