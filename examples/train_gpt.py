"""Train a GPT in less memory than training needs, and go on where a killed run has stopped.

    python examples/train_gpt.py --in-memory           plain torch
    python examples/train_gpt.py                       with offload: most of it is on disk
    python examples/train_gpt.py --save checkpoints    again after a crash: it goes on

All three give the same bits, and the loop is the one that you have. `make demo` runs them under a
memory limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, batches

import offload

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
BATCH, LENGTH = 2, 128


def make(args: argparse.Namespace) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(args.seed)
    model = GPT(layers=args.layers, width=args.width, heads=args.width // 64)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    if args.in_memory:  # plain torch
        return model, optimizer
    model, optimizer = offload.prepare(model, optimizer, host_memory=args.memory, nvme=args.nvme)
    return model, optimizer


def train(model: GPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> list[float]:
    """Train; return the losses of all steps since the first start."""
    losses = resume(model, optimizer, args)
    for batch in islice(batches(args.steps, BATCH, LENGTH, args.seed), len(losses), None):
        begin = time.perf_counter()
        loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        note(args, step=len(losses), loss=losses[-1], seconds=time.perf_counter() - begin)
        print(f"step {len(losses)}/{args.steps} | loss {losses[-1]:.3f}", flush=True)
        if args.save is not None and len(losses) % args.every == 0:
            path = args.save / f"{len(losses)}"
            offload.save(path, model, optimizer, extra={"losses": losses}, keep=2)
    return losses


def resume(model: GPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> list[float]:
    """Load the newest whole checkpoint, if there is one; return the losses up to it."""
    if args.save is None or not any(args.save.glob("[0-9]*")):  # whole ones have names
        return []
    losses: list[float] = offload.load(args.save, model, optimizer)["losses"]
    print(f"goes on after step {len(losses)}", flush=True)
    return losses


def note(args: argparse.Namespace, **what: Any) -> None:
    """Write a line of JSON at once, so that the progress of a run that is killed can be read."""
    if args.log is not None:
        with args.log.open("a") as file:
            file.write(json.dumps(what) + "\n")


def digest(model: GPT) -> str:
    """Return a hash of every bit of every parameter."""
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-memory", action="store_true", help="torch alone")
    parser.add_argument("--host-memory", dest="memory", default="128MiB", help="for the engine")
    parser.add_argument("--nvme", type=Path, default=tempfile.gettempdir(), help="a directory")
    parser.add_argument("--save", type=Path, help="a directory for checkpoints")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--log", type=Path, help="a line of JSON is added for every step")
    parser.add_argument("--trace", type=Path, help="write the run's trace for `offload report`")
    return parser.parse_args()


def main() -> None:
    args = parse()
    model, optimizer = make(args)
    count = sum(p.numel() for p in model.parameters())
    note(args, parameters=count)
    print(f"{count / 1e6:.1f} M parameters", flush=True)
    losses = train(model, optimizer, args)
    if not args.in_memory:
        told = offload.report(model)
        print(told)
        if args.trace is not None:
            told.save_trace(args.trace)
        offload.close(model)  # a plain model again
    found = digest(model)
    note(args, digest=found)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    print(f"parameters: {found[:16]}")


if __name__ == "__main__":
    main()
