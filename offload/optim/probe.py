"""How fast are these drives and these cores? A short measurement, only made when it is asked for.

The drives: chunks pass through the same pipeline as in a step, with nothing to do in between. The
cores: AdamW's kernel on memory of its own, the median of a few runs. Neither takes more memory or
room on disk than the plan would; both have given it back when they return.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload import kernels, rules
from offload.budget import Budget
from offload.layout import ELEMENT_BYTES, ParamSpec
from offload.metrics import Metrics
from offload.optim.desk import Desk
from offload.optim.ledger import Ledger
from offload.optim.pipeline import Pipeline
from offload.optim.tiers import Piece, Tiers
from offload.planner import Plan, Speeds, make_plan
from offload.pool import Pool
from offload.store import DiskStore

DISK_BYTES = 192 << 20  # written, then read and written again
_CHUNK_BYTES = 8 << 20
_UPDATE_NUMEL = 8 << 20  # 128 MiB: not to be had from a cache
_UPDATES = 5
_FIELDS = ("exp_avg", "exp_avg_sq")
_ROUND_NUMEL = 1024  # what a field is rounded up to


def measure(plan: Plan, directories: Sequence[Path], has_kernel: bool) -> Speeds:
    """Speeds of what the plan uses. has_kernel: else the update runs torch's own code, whose speed
    is not measured here.
    """
    disk = _disk_bytes_per_s(plan, directories) if plan.disk_bytes else None
    update = _update_bytes_per_s(plan) if has_kernel and plan.arena_bytes else None
    return Speeds(disk, update)


def _disk_bytes_per_s(plan: Plan, directories: Sequence[Path]) -> float | None:
    element_bytes = ELEMENT_BYTES * len(_FIELDS)
    nbytes = min(plan.disk_bytes, DISK_BYTES)
    # Several times as many chunks as buffers, so that reads and writes meet.
    wanted = min(plan.buffer_bytes, _CHUNK_BYTES, nbytes // (3 * plan.buffers)) // element_bytes
    chunk_numel = max(wanted // _ROUND_NUMEL, 1) * _ROUND_NUMEL
    small = make_plan(
        [ParamSpec("probe", nbytes // element_bytes, _FIELDS)],
        plan.buffers * chunk_numel * element_bytes,
        has_disk=True,
        chunk_numel=chunk_numel,
    )
    if not small.disk_bytes:  # too little to tell anything
        return None
    metrics = Metrics()
    ledger = Ledger(metrics)
    pool = Pool(small.arena_bytes, budget=Budget())
    memory = [pool.buffer()]
    with DiskStore(directories, small.disk_capacity_bytes, metrics=metrics, memory=memory) as store:
        pipeline = Pipeline(Tiers(small, pool, store), None, metrics)
        moving = [chunk for chunk in small.chunks if chunk.number not in small.resident]
        pipeline.run(moving, _Noise())
        with ledger.step():
            pipeline.run(moving, _nothing_to_do)
    pool.close()
    return ledger.speeds.disk_bytes_per_s


class _Noise:
    """Fills chunks: drives may write zeros faster than anything else."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(1)  # torch's own must not move

    def __call__(self, piece: Piece, desk: Desk | None) -> bool:
        piece.memory.view(torch.int32).random_(generator=self._generator)
        return True


def _nothing_to_do(piece: Piece, desk: Desk | None) -> bool:
    return True


def _update_bytes_per_s(plan: Plan) -> float:
    tensors = 2 + len(_FIELDS)  # parameter and gradient
    numel = max(1, min(_UPDATE_NUMEL, plan.numel, plan.arena_bytes // (tensors * ELEMENT_BYTES)))
    memory = [
        torch.ones(numel, device="cpu") for _ in range(tensors)
    ]  # written to: empty pages would be one
    each_s = sorted(_update_s(memory) for _ in range(_UPDATES))
    return ParamSpec("probe", numel, _FIELDS).touched_bytes() / each_s[_UPDATES // 2]


def _update_s(memory: Sequence[Tensor]) -> float:
    rule = rules.Adam.at(
        1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True
    )
    begin_s = time.perf_counter()
    kernels.update(rule, *memory)
    return time.perf_counter() - begin_s
