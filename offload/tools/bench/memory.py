"""Measures memory bandwidth: a copy, on all threads, of more bytes than the caches hold."""

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
    """Lend flat fp32 tensors with `counts` elements while the block runs, in pool memory as the
    engine uses it. The caller must drop all references to them before the block ends.
    """
    sizes = [count * torch.float32.itemsize for count in counts]
    rounded = sum(-(-nbytes // _PAGE) * _PAGE for nbytes in sizes)
    with Pool(max(rounded, _PAGE), budget=Budget()) as pool:
        yield [pool.lease(nbytes).tensor(torch.float32) for nbytes in sizes]


def measure_memory(sizes: BenchSizes, listener: Listener) -> Figure:
    """Measure the bytes per second, read and written together, of a copy in host memory."""
    name = "memory copy"
    listener.begin(name)
    numel = max(1, sizes.memory_bytes // torch.float32.itemsize)
    with borrowed([numel, numel]) as (source, target):
        source.fill_(1.0)  # untouched pages would all be the same zero page
        nbytes = source.nbytes + target.nbytes

        def run() -> float:
            begin_s = time.perf_counter()
            target.copy_(source)
            return nbytes / (time.perf_counter() - begin_s)

        figure = Figure.of(name, FigureUnit.BYTES_PER_S, repeat(run, sizes.runs, listener.at))
    listener.done(figure)
    return figure
