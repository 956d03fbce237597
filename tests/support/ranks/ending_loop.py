"""One rank that trains a little and ends as programs do: RANK STORE HOW, where HOW says what is
closed before the end. A program of its own: processes that tests fork leave without the end of the
interpreter.
"""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _tasks() -> dict[str, str]:
    """The names of this process's threads, Python's or not."""
    return {task.name: (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}


@atexit.register  # before those of offload, so that it is called after them
def _look_for_connections() -> None:
    """Threads of gloo, each of which may let go of a tensor at any moment. The program's own may
    be there: torch holds on to its group.
    """
    left = [name for task, name in _tasks().items() if task not in BEFORE]
    left = [name for name in left if name.startswith("pt_gloo")]
    if left:
        print(f"{len(left)} threads of connections are left", file=sys.stderr, flush=True)
        os._exit(3)


import offload  # noqa: E402

BEFORE: set[str] = set()  # threads that are not ours


def main(rank: int, store: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    BEFORE.update(_tasks())
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
