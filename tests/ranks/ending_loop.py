"""One rank that trains a little and ends as programs do: RANK STORE HOW, where HOW says what is
closed before the end. A program of its own: processes that tests fork leave without the end of the
interpreter.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import offload


def main(rank: int, store: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if how.startswith("prepare"):
        model, optimizer = offload.prepare(model, optimizer, device="cpu")
    else:
        optimizer = offload.wrap(optimizer)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if how.endswith("closed"):
        offload.close(model if how.startswith("prepare") else optimizer)
    if not how.endswith("alone"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
