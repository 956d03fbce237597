"""A training as `torchrun --max-restarts` runs it: each start goes on from the newest checkpoint,
if there is one. `restart_loop.py FOLDER STEPS DYING`: in the first start rank 1 is killed in the
step DYING. Rank 0 prints the step it began with and the digest at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

import offload
from offload.core.errors import ConfigError
from support.ranks import checkpoint_cases as cases


def train(rank: int, folder: Path, steps: int, dying: int | None) -> tuple[int, str]:
    """Train; return the step it began with, and the digest at the end.

    dying: the step in which rank 1 is killed.
    """
    model, optimizer = cases.build()
    begin = 0
    try:
        begin = offload.load(folder, model, optimizer)["step"]
    except ConfigError:  # nothing was saved yet, on all ranks alike
        assert not list(folder.glob("*"))
    for step in range(begin, steps):
        dist.barrier()  # as gradients that are averaged
        cases.train(model, optimizer, range(step, step + 1))
        if step == dying and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 1:
            path = folder / f"{step + 1}"
            offload.save(path, model, optimizer, extra={"step": step + 1}, keep=2)
    return begin, cases.digest(model, optimizer)


def main(folder: Path, steps: int, dying: int) -> None:
    dist.init_process_group("gloo")
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    found = train(dist.get_rank(), folder, steps, dying if is_first else None)
    if dist.get_rank() == 0:
        print("ended", *found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
