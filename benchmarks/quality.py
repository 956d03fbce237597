"""Quality beside speed and memory: `make quality`.

A GPT learns the text of examples/text/, with the same tokens in the same order, in every precision
and on every tier; then the loss on text that it has not seen is taken. Every case is a process of
its own, for each of three seeds. OFFLOAD_BENCH_DIR changes the directory on the drive.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import torch
import torch.nn.functional as F
from gpt import GPT, batches, text
from quality_results import CASES, Case, Precision, Result, Tier, find_demands, write_quality
from torch import Tensor

import offload
from offload.core.errors import CapacityError

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
BATCH, LENGTH = 8, 128
WARM_UP = 3  # steps that are not timed
ROOM = 1.25  # over the least host memory that works


class MasterAdamW:
    """The optimizer that people write by hand: AdamW on an fp32 copy of bf16 parameters, rounded
    after a step.
    """

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in params]
        self.inner = torch.optim.AdamW(self.masters, **HYPER)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
            master.grad = None

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def held_bytes(self) -> int:
        return sum(m.nbytes for m in self.masters) + _state_bytes(self.inner)


def least_bytes(ask: Callable[[int], object], most: int) -> int:
    """Find the least host memory that works, within 16 KiB; `ask` raises CapacityError for less."""
    low, high = 0, most
    while high - low > 16 << 10:
        middle = (low + high) // 2
        try:
            ask(middle)
            high = middle
        except CapacityError:
            low = middle
    return high


def make(case: Case, options: dict[str, Any]) -> tuple[GPT, Any]:
    """Make the model and its optimizer, on its tier."""
    torch.manual_seed(options["seed"])
    model = GPT(options["layers"], options["width"], options["width"] // 64, LENGTH)
    if case.precision is not Precision.FP32:
        model = model.to(torch.bfloat16)
    device = torch.device(options["device"])
    params = list(model.parameters())
    if case.tier is not Tier.ALL_ON_DISK:
        model = model.to(device)
    if case.tier is Tier.TORCH:
        by_hand = case.precision is Precision.MASTER
        return model, MasterAdamW(params) if by_hand else torch.optim.AdamW(params, **HYPER)
    optimizer = torch.optim.AdamW(params, **HYPER)
    nvme, most = options["directory"], 32 * sum(p.numel() for p in params) + (64 << 20)
    if case.tier is Tier.WRAPPED:
        return model, offload.wrap(optimizer)
    if case.tier is Tier.STATE_ON_DISK:
        least = least_bytes(lambda n: offload.plan(optimizer, host_memory=n, nvme=nvme), most)
        return model, offload.wrap(optimizer, host_memory=int(ROOM * least), nvme=nvme)
    place = {"nvme": nvme, "device": str(device)}
    least = least_bytes(lambda n: offload.plan(model, optimizer, host_memory=n, **place), most)
    return offload.prepare(model, optimizer, host_memory=int(ROOM * least), **place)


def train(model: GPT, optimizer: Any, options: dict[str, Any]) -> list[float]:
    """Train; return the seconds of each step."""
    seconds = []
    for batch in batches(options["steps"], BATCH, LENGTH, options["seed"]):
        begin = time.perf_counter()
        loss = model.loss(batch.to(options["device"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # a device has done it all
        seconds.append(time.perf_counter() - begin)
    return seconds


@torch.no_grad()
def validate(model: GPT, device: str) -> float:
    """Return the mean loss of a token of the text that was held out, computed in fp32 from the
    logits.
    """
    tokens = text(is_held_out=True)
    pieces = tokens[: (len(tokens) - 1) // LENGTH * LENGTH].view(-1, LENGTH).to(device)
    nexts = tokens[1 : pieces.numel() + 1].view(-1, LENGTH).to(device)
    logits = torch.cat([model(part).float().cpu() for part in pieces.split(BATCH)])
    return F.cross_entropy(logits.flatten(0, 1), nexts.cpu().flatten()).item()


def memory_of(case: Case, model: GPT, optimizer: Any) -> tuple[int, int]:
    """Return host and disk bytes of parameters, gradients and state, where the plan has put them:
    what the drive holds at one moment depends on which chunks are in a buffer, never written so
    far.
    """
    numel_bytes = sum(p.nbytes for p in model.parameters())
    on_host = 2 * numel_bytes if next(model.parameters()).is_cpu else 0  # with gradients
    if case.tier is Tier.TORCH:
        is_ours = isinstance(optimizer, MasterAdamW)
        held = optimizer.held_bytes() if is_ours else _state_bytes(optimizer)
        return on_host + held if on_host else 0, 0
    told = offload.report(optimizer)
    if told.model is not None:
        shares, away = told.model.shares, told.model.param_bytes - told.model.memory_bytes
        on_disk = told.plan.disk_bytes + max(0, away) + shares.gradients_on_disk
        return told.model.host_bytes, on_disk
    return on_host + told.plan.arena_bytes, told.plan.disk_bytes


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    fields = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in fields if isinstance(value, Tensor))


def digest(model: GPT) -> str:
    """Return a hash of every bit of every parameter."""
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_one(options: dict[str, Any]) -> Result:
    """Train and validate one case in this process."""
    case = CASES[options["case"]]
    before = _peak_bytes()
    model, optimizer = make(case, options)
    seconds = train(model, optimizer, options)
    host, disk = memory_of(case, model, optimizer)
    on_cpu = options["device"] == "cpu"
    on_device = None if on_cpu else int(torch.accelerator.max_memory_allocated())
    grown = _peak_bytes() - before
    loss = validate(model, options["device"])
    if case.tier is not Tier.TORCH:
        offload.close(model if case.tier is Tier.ALL_ON_DISK else optimizer)
    timed = seconds[WARM_UP:] or seconds
    return Result(
        case=options["case"],
        seed=options["seed"],
        loss=loss,
        digest=digest(model),
        step_s=statistics.median(timed),
        device_bytes=on_device,
        host_bytes=host,
        disk_bytes=disk,
        grown_bytes=grown,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_in_process(options: dict[str, Any]) -> Result:
    """Run one case in a process of its own, so that its memory is its own."""
    command = [sys.executable, __file__, "--one", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a directory for table and picture")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_one(json.loads(options.one)).__dict__))
        return 0
    if options.seeds < 2:
        parser.error(f"--seeds: {options.seeds} tell nothing of noise; at least 2 are needed")
    directory = Path(os.environ.get("OFFLOAD_BENCH_DIR") or "build/bench").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(options, name) for name in ("steps", "layers", "width", "device")}
    results = []
    for seed in range(1, options.seeds + 1):
        for number, case in enumerate(CASES):
            each = {**shape, "case": number, "seed": seed, "directory": str(directory)}
            results.append(run_in_process(each))
            told = f"{results[-1].loss:.4f}, {results[-1].step_s:.3f} s a step"
            print(f"seed {seed}: {case}: {told}", file=sys.stderr, flush=True)
    path = write_quality("make quality", results, {**shape, "tokens": BATCH * LENGTH}, options.out)
    print(f"{path.read_text()}\nwritten: {path}")
    return 0 if all(demand.met for demand in find_demands(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
