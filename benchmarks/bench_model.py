"""A prepared model in a training step, for several budgets of host memory, beside plain torch and
DeepSpeed: `make bench ONLY=model`, or pytest benchmarks/bench_model.py.

A GPT of 168 M bf16 parameters on 128 and on 2,048 tokens a step, clipped. Every contestant is a
process of its own and runs a few steps by turns. OFFLOAD_BENCH_ROUNDS changes the number of turns,
OFFLOAD_BENCH_DIR the directory for what is on disk, OFFLOAD_BENCH_LAYERS the size of the model (for
a try).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_wrap import FIO_BYTES, deepspeed_entries, task
from contest import rounds
from model_results import DISK, FEW, MANY, RESIDENT
from wrap_contest import OURS, Entry, Sitting, sit
from wrap_results import HOST, TORCH

MI = 1 << 20
LAYERS = 12  # of the model that the budgets are for
# Gradients (321 MiB) are in memory always. Beside them: three blocks and buffers for state; all
# parameters; all parameters and a quarter of the state.
BUDGETS_MI = {DISK: 512, "prepared, 800 MiB": 800, "prepared, 1,280 MiB": 1280}
ROUNDS = {FEW: 10, MANY: 4}
TOKENS = {FEW: 128, MANY: 2048}


def entries_of(what: str, directory: Path) -> list[Entry]:
    work = task("bfloat16", TOKENS[what])
    share = work["layers"] / LAYERS
    entries = [
        Entry(TORCH, "torch", {"task": work}),
        Entry(HOST, "offload", {"task": work}),
        Entry(RESIDENT, "prepared", {"task": work}),
    ]
    for name, budget_mi in BUDGETS_MI.items():
        budget = int(max(share, 0.5) * budget_mi * MI)
        place = {"host_memory": budget, "nvme": str(directory)}
        entries.append(Entry(name, "prepared", {"task": work, **place}))
    return entries + deepspeed_entries("nvme", directory, TOKENS[what])[1:]


def check_losses(sitting: Sitting) -> None:
    """Check that the losses have the same bits wherever parameters and state are."""
    found = [runner for runner in sitting.runners if runner.entry.kind in OURS]
    for runner in found[1:]:
        assert [s.loss for s in runner.steps] == [s.loss for s in found[0].steps], runner.name


@pytest.mark.parametrize("what", [FEW, MANY])
def test_steps(benchmark: Any, model_table: list[Sitting], directory: Path, what: str) -> None:
    """All contestants by turns, in one sitting."""
    entries = entries_of(what, directory)
    sitting = benchmark.pedantic(
        lambda: sit(what, entries, directory, rounds(ROUNDS[what]), FIO_BYTES), rounds=1
    )
    check_losses(sitting)
    model_table.append(sitting)
