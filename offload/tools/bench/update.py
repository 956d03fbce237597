"""Measures AdamW on these cores, and a pass over the same memory without arithmetic as ceiling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from offload import kernels
from offload.optim.probe import TENSORS, UpdateRun
from offload.tools.bench.figure import Figure, FigureUnit, Listener, repeat
from offload.tools.bench.memory import borrowed
from offload.tools.bench.sizes import BenchSizes

NAME = "AdamW update"


@contextmanager
def update_run(sizes: BenchSizes) -> Iterator[UpdateRun]:
    """Provide a repeatable AdamW update while the block runs, on pool memory like the engine's."""
    with borrowed([sizes.update_numel] * TENSORS) as memory:
        yield UpdateRun(memory)


def measure_update(
    update: UpdateRun, sizes: BenchSizes, listener: Listener
) -> tuple[Figure, Figure | None]:
    """Measure the bytes per second, read and written, of the update and of the pass without
    arithmetic. The second figure is None if the native core, which has the pass, is not in use.
    """
    listener.begin(NAME)
    has_pass = kernels.native_error() is None
    passes: list[float] = []

    def run() -> float:
        if has_pass:  # in turns: a change in the machine's speed affects both
            passes.append(_touch_bytes_per_s(update))
        return update.touched_bytes / update.run_s()

    figure = Figure.of(NAME, FigureUnit.BYTES_PER_S, repeat(run, sizes.runs, listener.at))
    listener.done(figure)
    if not has_pass:
        return figure, None
    ceiling = Figure.of("the same, no arithmetic", FigureUnit.BYTES_PER_S, passes[1:])
    listener.done(ceiling)
    return figure, ceiling


def _touch_bytes_per_s(update: UpdateRun) -> float:
    """Make two passes without arithmetic, of which the second undoes the changes of the first;
    return the bytes per second.
    """
    from offload import _native  # may be missing

    param, grad, *states = update.memory
    first, second = (state.data_ptr() for state in states)
    begin_s = time.perf_counter()
    for _ in range(2):
        _native.touch(param.data_ptr(), grad.data_ptr(), first, second, param.numel(), 0)
    return 2 * update.touched_bytes / (time.perf_counter() - begin_s)
