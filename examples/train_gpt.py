"""Train a GPT whose optimizer state exceeds its host memory, and show that no bit differs.

What `make demo` runs. One model has `torch.optim.AdamW(fused=True)`, the other the same optimizer
after `offload.wrap`, with a quarter of its state's size as `host_memory`: the rest is on disk. The
loop is the same for both.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpt import GPT, batches

import offload

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> tuple[float, float]:
    """Loss, and the seconds that the update took."""
    loss = model.loss(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    begin = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - begin
    optimizer.zero_grad()
    return loss.item(), seconds


def draw(
    losses: list[float], seconds: dict[str, list[float]], told: offload.Report, path: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
    left.plot(losses)
    left.set(xlabel="step", ylabel="loss", title="one curve: both runs agree to the bit")
    for name, values in seconds.items():
        middle.plot([s * 1e3 for s in values], label=name)
    middle.set(xlabel="step", ylabel="ms", title="optimizer.step()", ylim=(0, None))
    middle.legend()
    each_ms = {cause: s / told.steps * 1e3 for cause, s in told.total.seconds.items() if s}
    right.barh(list(each_ms), list(each_ms.values()))
    right.set(xlabel="ms a step", title="where the time of step() goes")
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nvme", type=Path, default=tempfile.gettempdir(), help="a directory")
    parser.add_argument("--picture", type=Path, help="write a picture here (needs matplotlib)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    ours = GPT(layers=options.layers)
    theirs = copy.deepcopy(ours)
    plain = torch.optim.AdamW(theirs.parameters(), **HYPER)
    wrapped = torch.optim.AdamW(ours.named_parameters(), **HYPER)
    budget = offload.plan(wrapped).state_bytes // 4
    print(offload.plan(wrapped, host_memory=budget, nvme=options.nvme), end="\n\n")
    offload.wrap(wrapped, host_memory=budget, nvme=options.nvme)

    losses: list[float] = []
    seconds: dict[str, list[float]] = {"offload, on disk": [], "torch fused, in memory": []}
    end = "" if sys.stdout.isatty() else "\n"
    begin = time.perf_counter()
    for step, batch in enumerate(batches(options.steps, 4, 128, options.seed), start=1):
        loss, update_s = train_step(ours, wrapped, batch)
        expected, torch_s = train_step(theirs, plain, batch)
        if loss != expected:
            print(f"\nstep {step}: loss {loss!r} differs from torch's {expected!r}")
            return 1
        losses.append(loss)
        for values, value in zip(seconds.values(), (update_s, torch_s), strict=True):
            values.append(value)
        rate = 2 * step * batch[:, 1:].numel() / (time.perf_counter() - begin)
        moved = offload.report(wrapped).last.moved["disk_written_bytes"] / 2**20
        line = f"step {step}/{options.steps}  loss {loss:.3f}  {rate:.0f} tokens/s  step() "
        line += f"{update_s * 1e3:.0f} ms ({torch_s * 1e3:.0f} in memory)  disk {moved:.0f} MiB"
        print(f"\r{line}   " if sys.stdout.isatty() else line, end=end, flush=True)
    print()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not torch.equal(mine.view(torch.int32), other.view(torch.int32)):
            print(f"{name}: differs from torch's")
            return 1
    told = offload.report(wrapped)
    print(told)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print("every loss and every parameter equals torch's, bit for bit")
    wrapped.close()
    if options.picture:
        draw(losses, seconds, told, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
