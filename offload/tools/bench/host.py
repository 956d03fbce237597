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
from offload.optim.probe import TENSORS, UpdateRun
from offload.tools.bench.figure import Figure, FigureUnit, Listener, measure, rate
from offload.tools.bench.sizes import BenchSizes

_PAGE = 4096


@contextmanager
def _borrowed(counts: Sequence[int]) -> Iterator[list[Tensor]]:
    """Lend flat fp32 tensors with `counts` elements while the block runs, in pool memory as the
    engine uses it. The caller must drop all references to them before the block ends.
    """
    sizes = [count * torch.float32.itemsize for count in counts]
    rounded = sum(-(-nbytes // _PAGE) * _PAGE for nbytes in sizes)
    with Pool(max(rounded, _PAGE), budget=Budget()) as pool:
        yield [pool.lease(nbytes).tensor(torch.float32) for nbytes in sizes]


def measure_memory(sizes: BenchSizes, listener: Listener) -> Figure:
    """Measure the bytes per second, read and written together, of a copy on all threads."""
    numel = max(1, sizes.memory_bytes // torch.float32.itemsize)
    with _borrowed([numel, numel]) as (source, target):
        source.fill_(1.0)  # untouched pages would all be the same zero page
        nbytes = source.nbytes + target.nbytes

        def run() -> float:
            return rate(nbytes, lambda: target.copy_(source))

        return measure("memory copy", FigureUnit.BYTES_PER_S, run, sizes.runs, listener)


@contextmanager
def update_run(sizes: BenchSizes) -> Iterator[UpdateRun]:
    """Provide a repeatable AdamW update while the block runs, on pool memory like the engine's."""
    with _borrowed([sizes.update_numel] * TENSORS) as memory:
        yield UpdateRun(memory)


def measure_update(
    update: UpdateRun, sizes: BenchSizes, listener: Listener
) -> tuple[Figure, Figure | None]:
    """Measure the bytes per second, read and written, of the update and of the pass without
    arithmetic. The second figure is None if the native core, which has the pass, is not in use.
    """
    has_pass = kernels.native_error() is None
    passes: list[float] = []

    def run() -> float:
        if has_pass:  # in turns: a change in the machine's speed affects both
            passes.append(rate(2 * update.touched_bytes, lambda: _touch_twice(update)))
        return update.touched_bytes / update.run_s()

    figure = measure("AdamW update", FigureUnit.BYTES_PER_S, run, sizes.runs, listener)
    if not has_pass:
        return figure, None
    ceiling = Figure.of("the same, no arithmetic", FigureUnit.BYTES_PER_S, passes[1:])
    listener.done(ceiling)
    return figure, ceiling


def _touch_twice(update: UpdateRun) -> None:
    """Make two passes without arithmetic, of which the second undoes the changes of the first."""
    from offload import _native  # may be missing

    param, grad, *states = update.memory
    first, second = (state.data_ptr() for state in states)
    for _ in range(2):
        _native.touch(param.data_ptr(), grad.data_ptr(), first, second, param.numel(), 0)
