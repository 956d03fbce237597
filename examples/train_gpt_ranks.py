"""Train one GPT with several processes: `torchrun --nproc-per-node 2 examples/train_gpt_ranks.py`.

--stage 1: the model is in torch's DistributedDataParallel, and each rank keeps a part of the
optimizer's state. 2: no DDP; gradients are averaged in slices. 3: parameters in slices, too. fsdp:
torch's fully_shard, with the state of each shard in host memory or on disk. The loop is one and the
same. With --save it begins where the newest whole checkpoint ends, written by any stage and number
of ranks, so that `torchrun --max-restarts 3 ...` goes on after a crash.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, batches
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.core.config import format_size

HYPER = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}


def set_up(stage: str, nvme: Path, host_memory: str | None) -> tuple[GPT, torch.nn.Module, object]:
    """Make the model, the module to call for its loss, and its optimizer."""
    torch.manual_seed(1)
    model = GPT(layers=4, width=256, heads=4)
    where = {"nvme": nvme, "host_memory": host_memory}
    if stage == "fsdp":
        for layer in [*model.blocks, model]:
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    if stage == "3":
        offload.prepare(model, optimizer, **where)
        return model, model, optimizer
    outside = DistributedDataParallel(model) if stage == "1" else model
    offload.wrap(optimizer, release_grads=stage == "2", **where)
    return model, outside, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=["1", "2", "3", "fsdp"], default="3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--host-memory", default="24MiB", help="of each rank, for the engine")
    parser.add_argument("--save", type=Path, help="a directory for checkpoints, every 5 steps")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    model, outside, optimizer = set_up(options.stage, options.nvme, options.host_memory)
    done = 0
    if options.save is not None and options.save.is_dir() and any(options.save.iterdir()):
        done = offload.load(options.save, model, optimizer)["step"]
    losses: list[float] = []
    text = batches(options.steps, 4 * count, 64, seed=1)
    for step, batch in enumerate(text, start=1):
        if step <= done:
            continue
        own = batch[4 * rank : 4 * (rank + 1)]  # every rank has other sequences
        logits = outside(own[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / count
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0:
            print(f"step {step}/{options.steps}  loss {losses[-1]:.4f}", flush=True)
        if options.save is not None and step % 5 == 0:
            offload.save(options.save / f"{step}", model, optimizer, extra={"step": step}, keep=2)
    told = offload.report(optimizer)
    print(f"rank {rank} of {count}: state {format_size(told.plan.state_bytes)}", flush=True)
    if rank == 0 and losses:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps\n{told}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
