"""Train a GPT whose parameters, gradients and optimizer state need far more host memory than
they get, and show that no bit differs.

What `make demo` runs. One model is plain, with `torch.optim.AdamW(fused=True)`; the other is the
same after `offload.prepare`: most of it is on disk, and comes back before it is needed. The loop is
the same for both.
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
from offload.config import format_size
from offload.model_plan import ModelPlan

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
BYTES_EACH = 16  # of a parameter, its gradient and its two moments, in fp32


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> tuple[float, float]:
    """Loss, and the seconds that it took."""
    begin = time.perf_counter()
    loss = model.loss(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), time.perf_counter() - begin


def progress_line(step: int, steps: int, loss: float, ours_s: float, plain_s: float) -> str:
    line = f"step {step}/{steps}  loss {loss:.3f}  {ours_s * 1e3:.0f} ms ({plain_s * 1e3:.0f} ms "
    return line + "with everything in memory)"


def tell_tiers(told: offload.Report) -> str:
    assert told.model is not None
    moved = told.last.moved
    stalls = told.model.stall_share or 0.0
    line = f"  waiting for parameters {stalls:.0%}  disk: "
    line += f"{format_size(moved['disk_read_bytes'])} read, "
    return line + f"{format_size(moved['disk_written_bytes'])} written"


def draw(
    losses: list[float],
    seconds: dict[str, list[float]],
    told: offload.Report,
    plan: ModelPlan,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, ((top, tiers), (times, waits)) = pyplot.subplots(2, 2, figsize=(11, 7))
    top.plot(losses)
    top.set(xlabel="step", ylabel="loss", title="one curve: both runs agree to the bit")
    names, each = list(plan.tiers), plan.tiers.values()
    in_memory, on_disk = ([one[tier] / 2**20 for one in each] for tier in ("host", "disk"))
    tiers.bar(names, in_memory, label="host memory")
    tiers.bar(names, on_disk, bottom=in_memory, label="disk")
    tiers.set(ylabel="MiB", title="where it is")
    tiers.legend()
    for name, values in seconds.items():
        times.plot([s * 1e3 for s in values], label=name)
    times.set(xlabel="step", ylabel="ms", title="a whole step", ylim=(0, None))
    times.legend()
    each_ms = {f"step(): {cause}": s / told.steps * 1e3 for cause, s in told.total.seconds.items()}
    for cause, waited_s in told.outside.items():
        each_ms[f"model: {cause}"] = waited_s / told.steps * 1e3
    waits.barh(list(each_ms), list(each_ms.values()))
    waits.set(xlabel="ms a step", title="where step() and the model's waits go")
    waits.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nvme", type=Path, default=tempfile.gettempdir(), help="a directory")
    parser.add_argument("--picture", type=Path, help="write a picture here (needs matplotlib)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    ours = GPT(layers=options.layers)
    theirs = copy.deepcopy(ours)
    plain = torch.optim.AdamW(theirs.parameters(), **HYPER)
    optimizer = torch.optim.AdamW(ours.parameters(), **HYPER)
    needed = BYTES_EACH * sum(p.numel() for p in ours.parameters())
    budget = {"host_memory": needed * 3 // 8, "nvme": options.nvme}
    given = format_size(budget["host_memory"])
    print(f"to train, the model needs {format_size(needed)}; of host memory it gets {given}\n")
    plan = offload.plan(ours, optimizer, **budget)
    print(plan, end="\n\n")
    ours, optimizer = offload.prepare(ours, optimizer, **budget)

    losses: list[float] = []
    seconds: dict[str, list[float]] = {
        "offload, most of it on disk": [],
        "torch, all in memory": [],
    }
    is_terminal = sys.stdout.isatty()
    for step, batch in enumerate(batches(options.steps, 4, 128, options.seed), start=1):
        loss, ours_s = train_step(ours, optimizer, batch)
        told = offload.report(optimizer)
        expected, plain_s = train_step(theirs, plain, batch)
        if loss != expected:
            print(f"\nstep {step}: loss {loss!r} differs from torch's {expected!r}")
            return 1
        losses.append(loss)
        for values, value in zip(seconds.values(), (ours_s, plain_s), strict=True):
            values.append(value)
        line = progress_line(step, options.steps, loss, ours_s, plain_s) + tell_tiers(told)
        print(
            f"\r{line:<130}" if is_terminal else line, end="" if is_terminal else "\n", flush=True
        )
    print(f"\n\n{offload.report(optimizer)}")
    offload.close(ours)  # a plain model again
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not torch.equal(mine.view(torch.int32), other.view(torch.int32)):
            print(f"{name}: differs from torch's")
            return 1
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print("every loss and every parameter equals torch's, bit for bit")
    if options.picture:
        draw(losses, seconds, told, plan, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
