"""Measures uploads to an accelerator and downloads, through the streams that the engine uses."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.device import DeviceTransfer
from offload.tools.bench.figure import Figure, FigureUnit, Listener, repeat
from offload.tools.bench.sizes import BenchSizes


def measure_copies(
    transfer: DeviceTransfer, sizes: BenchSizes, listener: Listener
) -> tuple[Figure, Figure]:
    """Measure the bytes per second of uploads and of downloads, between a pool's memory and the
    device; return both figures in this order.
    """
    with (
        Pool(sizes.copy_bytes, budget=Budget(), device=transfer.device) as pool,
        pool.lease(pool.capacity_bytes, what="copies") as lease,
        transfer.allocate(lease.nbytes, "copies") as buffer,
    ):
        host = lease.tensor(torch.uint8).fill_(1)

        def up() -> None:
            buffer.fill(host).wait()

        def down() -> None:
            transfer.read(buffer.use(), host, "copies").wait()

        to_device = _measure("copy to device", up, host.nbytes, sizes, listener)
        return to_device, _measure("copy to host", down, host.nbytes, sizes, listener)


def _measure(
    name: str,
    copy: Callable[[], None],
    nbytes: int,
    sizes: BenchSizes,
    listener: Listener,
) -> Figure:
    def run() -> float:
        begin_s = time.perf_counter()
        copy()
        return nbytes / (time.perf_counter() - begin_s)

    listener.begin(name)
    figure = Figure.of(name, FigureUnit.BYTES_PER_S, repeat(run, sizes.runs, listener.at))
    listener.done(figure)
    return figure
