"""Programs that end as programs do: `ending_loop.py FOLDER WAY...`. For each way two ranks train a
little; the way says what is closed before the end. The errors of each and its exit code go to files
in FOLDER.

Each is a process of its own, which leaves by the end of the interpreter. All are forked from one
that has torch imported, but not offload: the exit handlers of offload are registered in an order
that the program depends on.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports, in seconds
import torch.distributed as dist

BEFORE: set[str] = set()  # threads that are not the engine's
DEADLINE_S = 120


def _tasks() -> dict[str, str]:
    """Return the names of this process's threads, Python's or not."""
    return {task.name: (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}


def _look_for_connections() -> None:
    """Exit with code 3 if threads of gloo are left, each of which may free a tensor at any moment.

    Those of the program's own process group may be there: torch keeps it.
    """
    left = [name for task, name in _tasks().items() if task not in BEFORE]
    left = [name for name in left if name.startswith("pt_gloo")]
    if left:
        print(f"{len(left)} threads of connections are left", file=sys.stderr, flush=True)
        os._exit(3)


def train(rank: int, store: Path, how: str) -> None:
    atexit.register(_look_for_connections)  # before offload's exit handlers: called after them
    import offload

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


def leave_work_behind() -> None:
    """Leave work to a worker without any other reference to it, whose thread is a daemon.

    The work must be done all the same.
    """
    from offload.distributed.worker import Worker

    def act() -> Any:
        time.sleep(0.5)
        return lambda: os.write(2, b"done")

    Worker("slow", at_end=lambda: os.write(2, b" and over")).put(act)


def fork(name: str, folder: Path) -> int:
    """Fork; return 0 in the child, whose errors go to a file of that name."""
    child = os.fork()
    if not child:
        signal.alarm(DEADLINE_S)  # it may hang anywhere
        with open(folder / f"{name}.txt", "wb") as file:
            os.dup2(file.fileno(), 2)
    return child


def main(folder: Path, ways: list[str]) -> None:
    gc.collect()
    gc.freeze()  # so that garbage collection at each end does not walk over what is imported
    children: dict[str, int] = {}
    for how in ways:
        for rank in (0, 1):
            name = f"{how} {rank}"
            children[name] = fork(name, folder)
            if not children[name]:
                return train(rank, folder / f"{how} store", how)
    children["worker"] = fork("worker", folder)
    if not children["worker"]:
        return leave_work_behind()
    for name, child in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / f"{name}.code").write_text(str(code))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
