"""Train a GPT that needs far more memory than it gets, and go on where a killed run has stopped.

    python examples/train_gpt.py                       most of it is on disk
    python examples/train_gpt.py --save checkpoints    again after a crash: it goes on
    python examples/train_gpt.py --in-memory           plain torch, to the same bits

The loop is the one that you have. `make demo` runs all three, and kills one of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, batches

import offload
from offload.core.config import format_size, parse_size

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
BYTES_EACH = 16  # of a parameter, its gradient and its two moments, in fp32
BATCH, LENGTH = 4, 128


def make(options: argparse.Namespace) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(options.seed)
    model = GPT(layers=options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    if options.in_memory:
        return model, optimizer
    needed = BYTES_EACH * sum(p.numel() for p in model.parameters())
    budget = parse_size("--host-memory", options.host_memory or needed * 3 // 8)
    note(options, needed_bytes=needed, budget_bytes=budget)
    needed_text, given = format_size(needed), format_size(budget)
    print(f"to train, this model needs {needed_text}; of host memory it gets {given}")
    print(offload.plan(model, optimizer, host_memory=budget, nvme=options.nvme), flush=True)
    return offload.prepare(model, optimizer, host_memory=budget, nvme=options.nvme)


def train(model: GPT, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> list[float]:
    """Train; return the losses of all steps since the first start."""
    losses: list[float] = []
    if options.save is not None and any(options.save.glob("[0-9]*")):  # whole ones have names
        losses = offload.load(options.save, model, optimizer)["losses"]
        print(f"goes on after step {len(losses)}", flush=True)
    text = islice(batches(options.steps, BATCH, LENGTH, options.seed), len(losses), None)
    bar = offload.progress(
        text,
        None if options.in_memory else optimizer,
        tokens=BATCH * LENGTH,
        start=len(losses),
        total=options.steps,
    )
    for batch in bar:
        begin = time.perf_counter()
        loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set(loss=losses[-1])
        note(options, step=len(losses), loss=losses[-1], seconds=time.perf_counter() - begin)
        if options.save is not None and len(losses) % options.every == 0:
            path = options.save / f"{len(losses)}"
            offload.save(path, model, optimizer, extra={"losses": losses}, keep=2)
    return losses


def note(options: argparse.Namespace, **what: Any) -> None:
    """Write a line of JSON at once, so that the progress of a run that is killed can be read."""
    if options.log is not None:
        with options.log.open("a") as file:
            file.write(json.dumps(what) + "\n")


def peak_bytes() -> int:
    """Return the peak of this process's memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def digest(model: GPT) -> str:
    """Return a hash of every bit of every parameter."""
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-memory", action="store_true", help="torch alone")
    parser.add_argument("--host-memory", help="default: three eighths of what training needs")
    parser.add_argument("--nvme", type=Path, default=tempfile.gettempdir(), help="a directory")
    parser.add_argument("--save", type=Path, help="a directory for checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--log", type=Path, help="a line of JSON is added for every step")
    parser.add_argument("--trace", type=Path, help="write the run's trace for `offload report`")
    options = parser.parse_args()

    before = peak_bytes()
    model, optimizer = make(options)
    losses = train(model, optimizer, options)
    facts: dict[str, Any] = {"rss_before_bytes": before, "peak_rss_bytes": peak_bytes()}
    if not options.in_memory:
        told = offload.report(optimizer)
        print(f"\n{told}")
        facts["host_bytes"], facts["disk_bytes"] = told.model.host_bytes, told.model.disk_bytes
        facts["seconds"] = {f"step(): {cause}": s for cause, s in told.total.seconds.items()}
        facts["seconds"] |= {f"model: {cause}": s for cause, s in told.outside.items()}
        if options.trace is not None:
            told.save_trace(options.trace)
        offload.close(model)  # a plain model again
    facts["digest"] = digest(model)
    note(options, **facts)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    grown = format_size(facts["peak_rss_bytes"] - before)
    print(f"the process has grown by {grown} at most; parameters: {facts['digest'][:16]}")


if __name__ == "__main__":
    main()
