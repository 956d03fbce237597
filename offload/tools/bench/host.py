"""Measures host memory on these cores: a copy of more bytes than the caches hold, AdamW, and a pass
over the same memory without arithmetic as its ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload import kernels
from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.optim.traffic import TENSORS, UpdateRun
from offload.planning.layout import round_up
from offload.planning.unit import PAGE
from offload.tools.bench.figure import Figure, FigureUnit, rate
from offload.tools.bench.sizes import Bench


@contextmanager
def _borrowed(counts: Sequence[int]) -> Iterator[list[Tensor]]:
    """Lend flat fp32 tensors with `counts` elements while the block runs, in pool memory as the
    engine uses it. The caller must drop all references to them before the block ends.
    """
    sizes = [count * torch.float32.itemsize for count in counts]
    rounded = sum(round_up(nbytes, PAGE) for nbytes in sizes)
    with Pool(max(rounded, PAGE), budget=Budget()) as pool:
        yield [pool.lease(nbytes).tensor(torch.float32) for nbytes in sizes]


def measure_memory(bench: Bench) -> Figure:
    """Measure the bytes per second, read and written together, of a copy on all threads."""
    numel = max(1, bench.sizes.memory_bytes // torch.float32.itemsize)
    with _borrowed([numel, numel]) as (source, target):
        source.fill_(1.0)  # untouched pages would all be the same zero page
        nbytes = source.nbytes + target.nbytes

        def run() -> float:
            return rate(nbytes, lambda: target.copy_(source))

        return bench.measure("memory copy", FigureUnit.BYTES_PER_S, run)


@contextmanager
def update_run(bench: Bench) -> Iterator[UpdateRun]:
    """Provide a repeatable AdamW update while the block runs, on pool memory like the engine's."""
    with _borrowed([bench.sizes.update_numel] * TENSORS) as memory:
        yield UpdateRun(memory)


def measure_update(bench: Bench, update: UpdateRun) -> tuple[Figure, Figure | None]:
    """Measure the bytes per second, read and written, of the update and of the pass without
    arithmetic. The second figure is None if the native core, which has the pass, is not in use.
    """
    has_pass = kernels.native_error() is None
    passes: list[float] = []

    def run() -> float:
        if has_pass:  # in turns: a change in the machine's speed affects both
            passes.append(rate(2 * update.touched_bytes, lambda: _touch_twice(update)))
        return update.touched_bytes / update.run_s()

    unit = FigureUnit.BYTES_PER_S
    figure = bench.measure("AdamW update", unit, run)
    return figure, bench.done("the same, no arithmetic", unit, passes[1:]) if has_pass else None


def _touch_twice(update: UpdateRun) -> None:
    """Make two passes without arithmetic, of which the second undoes the changes of the first."""
    from offload import _native  # may be missing

    param, grad, *states = update.memory
    first, second = (state.data_ptr() for state in states)
    for _ in range(2):
        _native.touch(param.data_ptr(), grad.data_ptr(), first, second, param.numel(), 0)
