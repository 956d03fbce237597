"""Train a GPT twice, with torch's fused AdamW and with ours, and show that not a bit differs.

This is what `make demo` runs today. The tiers (`offload.wrap`, `offload.prepare`) are not there
yet: all state is in host memory here, and the loop calls the update kernel itself.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
from gpt import GPT, batches
from torch import nn

from offload import kernels, rules

HYPER = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
BETA1, BETA2 = 0.9, 0.95


class KernelAdamW:
    """The update of one step, spelled out: one rule, one pass over memory for each parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        rule = rules.Adam.at(self.steps, beta1=BETA1, beta2=BETA2, decoupled=True, **HYPER)
        for param, (m, v) in zip(self.params, self.moments, strict=True):
            kernels.update(rule, param.detach(), param.grad, m, v)


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer | KernelAdamW, batch: torch.Tensor
) -> tuple[float, float]:
    """Loss, and the seconds that the update took."""
    model.zero_grad()
    loss = model.loss(batch)
    loss.backward()
    begin = time.perf_counter()
    optimizer.step()
    return loss.item(), time.perf_counter() - begin


def draw(losses: list[float], seconds: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot(losses)
    left.set(xlabel="step", ylabel="loss", title="one curve: both runs agree to the bit")
    right.boxplot(
        [[s * 1e3 for s in values] for values in seconds.values()], tick_labels=list(seconds)
    )
    right.set(ylabel="ms", title="update of all parameters", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="write a picture here (needs matplotlib)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    ours = GPT(layers=options.layers)
    theirs = copy.deepcopy(ours)
    numel = sum(p.numel() for p in ours.parameters())
    reason = kernels.native_error()
    print(f"GPT of {numel / 1e6:.1f} M parameters, {16 * numel / 2**20:.0f} MiB of training state")
    print(
        f"kernels: {kernels.isa()}, {kernels.num_threads()} threads",
        f"({reason})" if reason else "",
    )

    by_kernel = KernelAdamW(ours)
    by_torch = torch.optim.AdamW(theirs.parameters(), betas=(BETA1, BETA2), fused=True, **HYPER)
    losses: list[float] = []
    seconds: dict[str, list[float]] = {"offload": [], "torch fused": []}
    end = "" if sys.stdout.isatty() else "\n"
    begin = time.perf_counter()
    for step, batch in enumerate(batches(options.steps, 4, 128, options.seed), start=1):
        loss, update_s = train_step(ours, by_kernel, batch)
        expected, torch_s = train_step(theirs, by_torch, batch)
        if loss != expected:
            print(f"\nstep {step}: loss {loss!r} differs from torch's {expected!r}")
            return 1
        losses.append(loss)
        seconds["offload"].append(update_s)
        seconds["torch fused"].append(torch_s)
        rate = 2 * step * batch[:, 1:].numel() / (time.perf_counter() - begin)
        line = f"step {step}/{options.steps}  loss {loss:.3f}  {rate:.0f} tokens/s"
        line += f"  update {update_s * 1e3:.1f} ms (torch {torch_s * 1e3:.1f})"
        print(f"\r{line}   " if sys.stdout.isatty() else line, end=end, flush=True)
    print()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not torch.equal(mine.view(torch.int32), other.view(torch.int32)):
            print(f"{name}: differs from torch's")
            return 1
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print("every loss and every parameter equals torch's, bit for bit")
    if options.picture:
        draw(losses, seconds, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
