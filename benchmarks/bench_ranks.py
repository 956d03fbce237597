"""Several ranks on this machine: memory and time of a step, beside torch's DDP and FSDP2 and
DeepSpeed's stages: `make bench ONLY=ranks`, or pytest benchmarks/bench_ranks.py.

Every contestant is a set of processes of its own, by turns. OFFLOAD_BENCH_ROUNDS changes the number
of turns, OFFLOAD_BENCH_LAYERS the size of the model (for a try).
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from contest import rounds
from ranks_results import RankRow

HERE = Path(__file__).parent
STEPS = 6  # of which the first two are not counted
COUNTS = (1, 2, 4)
HOST_MEMORY = "448MiB"  # of a rank, where some is on disk: whole blocks and gradients need 282 MiB


class Entrant(NamedTuple):
    name: str
    kind: str
    passes: int | None  # times that parameters or gradients pass over the network
    on_disk: bool = False


ENTRANTS = [
    Entrant("torch, DDP", "ddp", 2),
    Entrant("offload, stage 1 (DDP)", "stage 1", 3),
    Entrant("offload, stage 2", "stage 2", 2),
    Entrant("offload, stage 3", "stage 3", 3),
    Entrant("offload, stage 3, on disk", "stage 3", 3, on_disk=True),
    Entrant("torch, FSDP2, CPUOffloadPolicy", "fsdp", None),
    Entrant("offload, FSDP2", "fsdp offload", None),
    Entrant("DeepSpeed, stage 1, optimizer on CPU", "deepspeed 1", None),
    Entrant("DeepSpeed, stage 2, optimizer on CPU", "deepspeed 2", None),
    Entrant("DeepSpeed, stage 3, optimizer on CPU", "deepspeed 3", None),
]


def task() -> dict[str, Any]:
    layers = int(os.environ.get("OFFLOAD_BENCH_LAYERS") or 2)
    return {"dtype": "float32", "tokens": 128, "layers": layers}


def run(entrant: Entrant, count: int, directory: Path) -> list[dict[str, Any]]:
    """Run the contestant with so many ranks; return what each rank reports."""
    options: dict[str, Any] = {"steps": STEPS, "task": task()}
    if entrant.on_disk:
        options |= {"nvme": str(directory), "host_memory": HOST_MEMORY}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [HERE / "peers", HERE.parent / "examples", os.environ.get("PYTHONPATH", "")]
    shared = {
        **os.environ,
        "WORLD_SIZE": f"{count}",
        "LOCAL_WORLD_SIZE": f"{count}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "PYTHONPATH": ":".join(map(str, paths)),
        "OMP_NUM_THREADS": f"{max(1, len(os.sched_getaffinity(0)) // count)}",
    }
    command = [sys.executable, str(HERE / "peers/rank_worker.py"), entrant.kind]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps(options)],
            env={**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err in said:
        assert out, f"{entrant.name}, {count} ranks:\n{err[-3000:]}"
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def can_run(entrant: Entrant, count: int) -> bool:
    if entrant.kind.startswith("deepspeed"):
        return importlib.util.find_spec("deepspeed") is not None
    return count > 1 or entrant.kind in ("ddp", "stage 3")


def test_ranks(benchmark: Any, ranks_table: list[RankRow], directory: Path) -> None:
    """All contestants by turns, with 1, 2 and 4 ranks."""
    contests = [(each, n) for n in COUNTS for each in ENTRANTS if can_run(each, n)]
    rows = {(each, n): RankRow(each.name, n) for each, n in contests}
    for (each, n), row in rows.items():
        row.theory = None if each.passes is None else each.passes * (n - 1) / n

    def contest() -> None:
        for _ in range(rounds(3)):
            for each, n in contests:
                _note(rows[each, n], run(each, n, directory))

    benchmark.pedantic(contest, rounds=1)
    ranks_table += rows.values()


def _note(row: RankRow, said: list[dict[str, Any]]) -> None:
    counted = [[step for step in one["steps"][2:]] for one in said]
    row.numel = said[0]["numel"]
    row.step_s.append(max(statistics.median(s["s"] for s in steps) for steps in counted))
    received = [statistics.mean(s["received"] for s in steps) for steps in counted]
    row.received_bytes.append(statistics.mean(received))
    row.peak_bytes.append(max(one["memory"]["peak_rss"] for one in said))
    states = [one["state"] for one in said if one["state"] is not None]
    row.state_bytes = max(states) if states else None
