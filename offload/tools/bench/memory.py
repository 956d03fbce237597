"""How fast memory is: a copy, on all threads, of more than caches hold."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.tools.bench.figure import Figure, FigureUnit, Listener, repeat
from offload.tools.bench.sizes import BenchSizes

_PAGE = 4096


@contextmanager
def borrowed(counts: Sequence[int]) -> Iterator[list[Tensor]]:
    """Flat fp32 tensors of so many elements each, in memory like that of the engine's. Nobody may
    keep them.
    """
    sizes = [count * torch.float32.itemsize for count in counts]
    rounded = sum(-(-nbytes // _PAGE) * _PAGE for nbytes in sizes)
    with Pool(max(rounded, _PAGE), budget=Budget()) as pool:
        yield [pool.lease(nbytes).tensor(torch.float32) for nbytes in sizes]


def measure_memory(sizes: BenchSizes, listener: Listener) -> Figure:
    """Bytes read and written a second."""
    name = "memory copy"
    listener.begin(name)
    numel = max(1, sizes.memory_bytes // torch.float32.itemsize)
    with borrowed([numel, numel]) as (source, target):
        source.fill_(1.0)  # empty pages would be one
        nbytes = source.nbytes + target.nbytes

        def run() -> float:
            begin_s = time.perf_counter()
            target.copy_(source)
            return nbytes / (time.perf_counter() - begin_s)

        figure = Figure.of(name, FigureUnit.BYTES_PER_S, repeat(run, sizes.runs, listener.at))
    listener.done(figure)
    return figure
