"""A long run: does its memory grow? `python benchmarks/soak.py --minutes 30`

Trains a prepared model whose gradients go to disk and a wrapped one by turns, evaluates them and
saves them in the background now and then. RSS, descriptors, threads and what Python holds are read
from time to time; a table at the end. Ends with 1 where RSS has grown by more than 1 % from the
third minute to the last.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload

WIDTH, LAYERS, BATCH = 256, 16, 16
EVALUATE_EVERY, SAVE_EVERY = 20, 100  # steps
WARM_UP_S = 120.0
MOST_GROWTH = 0.01


@dataclass(frozen=True)
class Sample:
    at_s: float
    steps: int
    rss_bytes: int
    private_bytes: int
    descriptors: int
    threads: int
    objects: int

    @classmethod
    def now(cls, at_s: float, steps: int) -> Sample:
        rss, private = (status_bytes(name) for name in ("VmRSS", "RssAnon"))
        files = len(os.listdir("/proc/self/fd"))
        return cls(
            at_s, steps, rss, private, files, threading.active_count(), len(gc.get_objects())
        )


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_prepared(directory: Path) -> tuple[Any, Any]:
    """Prepare a model with the least power of two of host memory that works: gradients and
    parameters are on disk.
    """
    for exponent in range(20, 30):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        try:
            made: tuple[Any, Any] = offload.prepare(
                model, optimizer, host_memory=1 << exponent, nvme=directory, units=[nn.Linear]
            )
        except offload.CapacityError:
            continue
        return made
    raise SystemExit("no budget below 1 GiB was accepted")


def make_wrapped(directory: Path, held_bytes: int) -> tuple[Any, Any]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, offload.wrap(optimizer, host_memory=held_bytes + (16 << 20), nvme=directory)


def train(model: Any, optimizer: Any, step: int, saves: Path) -> None:
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % EVALUATE_EVERY == 0:
        with torch.no_grad():
            model(torch.randn(BATCH, WIDTH))
        str(offload.report(optimizer))
    if step % SAVE_EVERY == 0:
        offload.save(saves / f"{step}", model, optimizer, keep=2, background=True)


def growth_of(samples: list[Sample]) -> float | None:
    """Return the growth of RSS from the third minute to the last; None: too short a run."""
    settled = [s for s in samples if s.at_s >= WARM_UP_S]
    first = [s.rss_bytes for s in settled if s.at_s < WARM_UP_S + 60]
    last = [s.rss_bytes for s in settled if s.at_s > samples[-1].at_s - 60]
    if not first or not last:
        return None
    return statistics.median(last) / statistics.median(first) - 1


def table(samples: list[Sample]) -> str:
    rows = ["| minute | steps | RSS, MiB | private, MiB | descriptors | threads | objects |"]
    rows.append("|--:|--:|--:|--:|--:|--:|--:|")
    every = max(1, len(samples) // 30)
    for s in (*samples[:-1:every], samples[-1]):
        numbers = f"{s.rss_bytes / 2**20:.1f} | {s.private_bytes / 2**20:.1f} | {s.descriptors}"
        rows.append(f"| {s.at_s / 60:.1f} | {s.steps} | {numbers} | {s.threads} | {s.objects} |")
    return "\n".join(rows)


def soak(minutes: float, every_s: float, directory: Path) -> list[Sample]:
    start_s = time.monotonic()
    prepared = make_prepared(directory)
    held = int(offload.report(prepared[1]).model.shares.total)  # type: ignore[union-attr]
    both = {"prepared": prepared, "wrapped": make_wrapped(directory, held)}
    samples: list[Sample] = []
    step = 0
    while (now_s := time.monotonic() - start_s) < 60 * minutes:
        step += 1
        for name, (model, optimizer) in both.items():
            train(model, optimizer, step, directory / name)
        if not samples or now_s - samples[-1].at_s >= every_s:
            samples.append(Sample.now(now_s, step))
    for _, optimizer in both.values():
        optimizer.close()
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from sample to sample")
    parser.add_argument("--directory", type=Path, help="of the drive; a temporary one by itself")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.directory) as made:
        for name in ("prepared", "wrapped"):
            Path(made, name).mkdir()
        samples = soak(args.minutes, args.every, Path(made))
    print(table(samples))
    growth = growth_of(samples)
    if growth is None:
        print("too short to tell: the first two minutes do not count")
        return 0
    print(
        f"RSS grew by {growth:.2%} from the third minute to the last; {MOST_GROWTH:.0%} is allowed"
    )
    return int(growth > MOST_GROWTH)


if __name__ == "__main__":
    raise SystemExit(main())
