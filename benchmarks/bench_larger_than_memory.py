"""A model whose bytes exceed the machine's memory: `make bench ONLY=larger_than_memory`, or pytest
benchmarks/bench_larger_than_memory.py.

A GPT of 2.56 billion bf16 parameters trains three steps with `host_memory="8GiB"`; with its
gradients and optimizer state it has 16 bytes a parameter, 41 GB, of which 36 are on disk.
OFFLOAD_BENCH_DIR changes the directory, OFFLOAD_BENCH_LAYERS the size of the model (for a try: the
budget shrinks with it).
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_wrap import FIO_BYTES
from disk_contest import Fio
from gpt import Block
from large_results import LargeRun
from wrap_contest import Entry, Worker, mixed_rate

GI = 1 << 30
LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS, STEPS = 32, 2560, 20, 16384, 128, 3
BUDGET_BYTES = 8 * GI
TASK = {
    "width": WIDTH,
    "heads": HEADS,
    "vocabulary": VOCABULARY,
    "tokens": TOKENS,
    "is_one_batch": True,
    "is_meta": True,
}


def layers() -> int:
    return int(os.environ.get("OFFLOAD_BENCH_LAYERS") or LAYERS)


def check_room(directory: Path, count: int) -> None:
    """Check that the drive has room for state, for parameters twice (those in memory may be on
    their way), and for what fio writes.
    """
    numel = count * 12 * WIDTH**2 + VOCABULARY * WIDTH
    needed = 16 * numel + FIO_BYTES + GI
    free = shutil.disk_usage(directory).free
    assert free > needed, f"{directory}: {free / GI:.0f} GiB are free, {needed / GI:.0f} are needed"


def measure_compute_s(count: int) -> float:
    """Measure forward and backward of one layer in memory; return the seconds of all layers."""
    torch.manual_seed(0)
    layer = Block(WIDTH, HEADS).to(torch.bfloat16)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    seconds = []
    for _ in range(7):
        layer.zero_grad()
        begin = time.perf_counter()
        layer(x).sum().backward()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:]) * count


def train(directory: Path) -> LargeRun:
    count = layers()
    budget = int(BUDGET_BYTES * max(count / LAYERS, 0.15))
    options = {"task": {**TASK, "layers": count}, "host_memory": budget, "nvme": str(directory)}
    fio = Fio(directory, FIO_BYTES)
    rates, steps = [mixed_rate(fio)], []
    compute_s = measure_compute_s(count)
    begin = time.perf_counter()
    worker = Worker(Entry("larger", "prepared", options), directory, warm_up=0)
    start_s = time.perf_counter() - begin
    try:
        for _ in range(STEPS):
            steps += worker.run(1)
            rates.append(mixed_rate(fio))
        facts = worker.facts()
    finally:
        worker.close()
        fio.close()
    return LargeRun(
        numel=worker.numel,
        tokens=TOKENS,
        budget_bytes=budget,
        start_s=start_s,
        compute_s=compute_s,
        fio_bytes_per_s=rates,
        steps=steps,
        peak_rss_bytes=facts["now"]["peak_rss"],
        on_disk_bytes=facts["on_disk"],
    )


def test_three_steps(benchmark: Any, large_table: list[LargeRun], directory: Path) -> None:
    check_room(directory, layers())
    run = benchmark.pedantic(train, args=(directory,), rounds=1)
    assert run.steps[-1].loss < run.steps[0].loss
    large_table.append(run)
