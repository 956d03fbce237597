"""How far ahead parameters are fetched, and what that does to a step: `make bench ONLY=prefetch`,
or pytest benchmarks/bench_prefetch.py.

A GPT of 183 M bf16 parameters in 24 layers on 512 tokens a step, everything on NVMe, with prefetch
depths from 0 (each block is fetched when it is needed) to 8, by turns. The variables of the
environment that change bench_model.py change it, too; it has twice as many layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench_model import LAYERS, MI, check_losses
from bench_wrap import FIO_BYTES, task
from contest import rounds
from model_results import hit_share, stall_share
from wrap_contest import Entry, Sitting, sit

DEPTHS = range(9)
# Gradients (350 MiB), buffers for state, and room for the embedding, the layer in use and eight
# prefetched ones: less than half of the parameters.
BUDGET_MI = 584
TOKENS = 512


def test_depths(benchmark: Any, prefetch_table: list[Sitting], directory: Path) -> None:
    work = task("bfloat16", TOKENS) | {"width": 768, "heads": 12}
    budget = int(max(work["layers"] / LAYERS, 0.25) * BUDGET_MI * MI)
    work["layers"] *= 2
    place = {"task": work, "host_memory": budget, "nvme": str(directory)}
    entries = [
        Entry(f"depth {depth}", "prepared", {**place, "prefetch_depth": depth}) for depth in DEPTHS
    ]
    sitting = benchmark.pedantic(
        lambda: sit("prefetch", entries, directory, rounds(6), FIO_BYTES), rounds=1
    )
    check_losses(sitting)
    for runner in sitting.runners:
        benchmark.extra_info[runner.name] = {
            "stall_share": stall_share(runner),
            "hit_share": hit_share(runner),
            "whole_s": runner.turn_s("whole_s"),
        }
    prefetch_table.append(sitting)
