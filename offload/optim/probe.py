"""A short measurement of the speeds of the drives and the cores, made only on request.

Drives: chunks pass through the same pipeline as in a step, without any work on them. Cores: AdamW's
kernel on memory of its own, the median of a few runs. Neither takes more memory or disk space than
the plan would; both have released it when they return.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload import kernels
from offload.kernels import rules
from offload.optim.traffic import FIELDS, Traffic, plan_traffic
from offload.planning.layout import ELEMENT_BYTES, ParamSpec
from offload.planning.state_plan import Plan, Speeds

DISK_BYTES = 192 << 20  # written, then read and written again
TENSORS = 2 + len(FIELDS)  # in an update: parameter, gradient and states
_CHUNK_BYTES = 8 << 20
_UPDATE_NUMEL = 8 << 20  # 128 MiB: more than a cache holds
_UPDATES = 5
_ROUND_NUMEL = 1024  # a field's size is a multiple of this


def measure(plan: Plan, directories: Sequence[Path], has_kernel: bool) -> Speeds:
    """Measure the speeds of the drives and cores that the plan uses. has_kernel: False if the
    update runs torch's own code, whose speed is not measured here. Blocks.
    """
    disk = _disk_bytes_per_s(plan, directories) if plan.disk_bytes else None
    update = _update_bytes_per_s(plan) if has_kernel and plan.arena_bytes else None
    return Speeds(disk, update)


def _disk_bytes_per_s(plan: Plan, directories: Sequence[Path]) -> float | None:
    element_bytes = ELEMENT_BYTES * len(FIELDS)
    nbytes = min(plan.disk_bytes, DISK_BYTES)
    # Several times as many chunks as buffers, so that reads and writes overlap.
    wanted = min(plan.buffer_bytes, _CHUNK_BYTES, nbytes // (3 * plan.buffers)) // element_bytes
    chunk_numel = max(wanted // _ROUND_NUMEL, 1) * _ROUND_NUMEL
    small = plan_traffic(nbytes, plan.buffers, chunk_numel)
    if not small.disk_bytes:  # too little to measure
        return None
    with Traffic(small, directories) as traffic:
        traffic.fill()
        moved = traffic.mix()
    return moved.bytes_per_s if moved.read_bytes and moved.written_bytes else None


def _update_bytes_per_s(plan: Plan) -> float:
    numel = max(1, min(_UPDATE_NUMEL, plan.numel, plan.arena_bytes // (TENSORS * ELEMENT_BYTES)))
    memory = [torch.empty(numel, dtype=torch.float32, device="cpu") for _ in range(TENSORS)]
    update = UpdateRun(memory)
    each_s = sorted(update.run_s() for _ in range(_UPDATES))
    return update.touched_bytes / each_s[_UPDATES // 2]


class UpdateRun:
    """A repeatable AdamW update over all of `memory`: `TENSORS` fp32 tensors of one size. They are
    written to first: untouched pages would all be the same zero page.
    """

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self.memory = [tensor.fill_(1.0) for tensor in memory]
        self.touched_bytes = ParamSpec("update", memory[0].numel(), FIELDS).touched_bytes()
        self._rule = rules.Adam.at(
            1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True
        )

    def run_s(self) -> float:
        """Run one update; return its seconds."""
        begin_s = time.perf_counter()
        kernels.update(self._rule, *self.memory)
        return time.perf_counter() - begin_s
