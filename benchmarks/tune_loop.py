"""A training loop for bench_tune.py: a GPT with everything on disk, on a drive that may be slow.

OFFLOAD_BENCH_DELAY_MS: so long each disk operation waits, in the I/O engine's own thread, so that a
drive does a piece of 1 MiB in that time at best. Prints what the report says as JSON at the end,
unless a trial of the tuner ends it before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

import offload
from offload.storage import disk
from offload.storage.engine import Fault, FaultKind, IOEngine

SEED = 20261117


def slow_down(delay_ms: int) -> None:
    """Delay each disk operation of every engine that a store opens from now on."""
    fast = disk.open_engine

    def open_slow(*args: Any, **options: Any) -> IOEngine:
        engine = fast(*args, **options)
        engine.inject(Fault(FaultKind.DELAY, forever=True, code=delay_ms))
        return engine

    disk.open_engine = open_slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "width", "tokens", "steps", "host-memory"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--profile")
    options = parser.parse_args()
    if delay_ms := int(os.environ.get("OFFLOAD_BENCH_DELAY_MS") or 0):
        slow_down(delay_ms)
    torch.manual_seed(SEED)
    model = GPT(options.layers, options.width, options.width // 64, options.tokens)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    fields = {"profile": options.profile} if options.profile else {}
    model, optimizer = offload.prepare(
        model, optimizer, host_memory=options.host_memory, nvme=options.nvme, **fields
    )
    for _ in range(options.steps):
        batch = torch.randint(256, (1, options.tokens + 1))
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = offload.report(model)
    chunks = {chunk.numel for chunk in told.plan.chunks}
    print(
        json.dumps(
            {"depth": told.model.depth, "chunk_numel": max(chunks), "tuned": told.tuned},
        )
    )


if __name__ == "__main__":
    main()
