"""One contestant in a process of its own: worker.py KIND OPTIONS, driven over a pipe.

Each line that comes in is a request, each line that goes out its answer, both JSON. `{"steps": 3}`
trains three steps and tells of each; `{"facts": true}` tells of memory and what the contestant says
of itself. The end of the input ends the process. The output of libraries goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import torch
from contestants import KINDS, Trainer
from task import Task


def io_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to drives, as the kernel counts
    them.
    """
    with open("/proc/self/io") as file:
        counts = dict(line.split(": ") for line in file.read().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def memory_bytes() -> dict[str, int]:
    """Return the resident memory of this process, now and at its peak."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file.read().splitlines())
    return {
        "rss": int(fields["VmRSS"].split()[0]) << 10,
        "peak_rss": int(fields["VmHWM"].split()[0]) << 10,
    }


def measure_step(trainer: Trainer, batch: torch.Tensor) -> dict[str, Any]:
    before, begin = io_bytes(), time.perf_counter()
    loss, optimizer_s = trainer.train(batch)
    whole_s, after = time.perf_counter() - begin, io_bytes()
    return {
        "whole_s": whole_s,
        "optimizer_s": optimizer_s,
        "read_bytes": after[0] - before[0],
        "written_bytes": after[1] - before[1],
        "loss": loss,
        **trainer.last_step(),
    }


def serve(requests: TextIO, answers: TextIO, kind: str, options: dict[str, Any]) -> None:
    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    task = Task(**options.pop("task"))
    model = task.make_model()
    if kind != "prepared":  # its whole point is that not all of the model is in memory
        task.run_without_optimizer(model)
    base = memory_bytes()
    trainer = KINDS[kind](task, model, **options)
    batches = task.batches()
    answer({"numel": task.numel})
    for line in requests:
        request = json.loads(line)
        if "steps" in request:
            steps = [measure_step(trainer, next(batches)) for _ in range(request["steps"])]
            answer({"steps": steps})
        else:
            answer({"base": base, "now": memory_bytes(), **trainer.facts()})
    trainer.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    serve(sys.stdin, answers, sys.argv[1], json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
