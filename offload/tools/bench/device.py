"""Measures where models are computed: large matrix products on the accelerator or on the CPU; and
copies to an accelerator and back, through the streams that the engine uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.device.device import DeviceTransfer
from offload.device.host import Transfer
from offload.tools.bench.figure import Figure, FigureUnit, rate
from offload.tools.bench.sizes import Bench

DTYPES = ("float32", "bfloat16")
_LEAST_WIDTH = 512  # a smaller product would not count as large
_TRIES = 3  # the fastest of them gives the duration of a product
_MOST_PRODUCTS = 1000  # in one run


class Product:
    """A benchmark that multiplies square matrices, `count` times in one run. `width` and `count`
    are chosen so that a run takes about `run_s`.
    """

    def __init__(self, dtype: str, transfer: Transfer, most_width: int, run_s: float) -> None:
        self._transfer = transfer
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.count = 1
        self.width = min(_LEAST_WIDTH, most_width)
        once_s = self._make()
        # Twice the width is eight times the work.
        while 2 * self.width <= most_width and 8 * once_s <= run_s:
            self.width *= 2
            once_s = self._make()
        self.count = min(_MOST_PRODUCTS, max(1, int(run_s / once_s)))

    @property
    def flops(self) -> float:
        """The floating-point operations of one run."""
        return 2.0 * self.width**3 * self.count

    def _make(self) -> float:
        """Allocate matrices of the present width; return the seconds of one run with them."""
        device = self._transfer.device
        shape = self.width, self.width
        # Not random, so that the random number generators of the caller's process do not advance.
        self._left = torch.full(shape, 0.5, dtype=self._dtype, device=device)
        self._right = torch.full(shape, 0.25, dtype=self._dtype, device=device)
        self._out = torch.empty(shape, dtype=self._dtype, device=device)
        self.seconds()  # warm-up: the first call initializes libraries
        return min(self.seconds() for _ in range(_TRIES))

    def seconds(self) -> float:
        """Make one run and wait for its result; return the seconds."""
        begin_s = time.perf_counter()
        for _ in range(self.count):
            torch.mm(self._left, self._right, out=self._out)
        self._arrive()
        return time.perf_counter() - begin_s

    def _arrive(self) -> None:
        """Wait for a device by reading one row of the last product. The CPU is synchronous."""
        if isinstance(self._transfer, DeviceTransfer):
            some = self._out[0].contiguous()
            host = self._transfer.pinned(some.numel(), some.dtype)
            self._transfer.read(some, host, "the end of a product").wait()


def measure_product(bench: Bench, dtype: str, transfer: Transfer) -> Figure:
    """Measure the floating-point operations per second of large products in `dtype`."""
    product = Product(dtype, transfer, bench.sizes.product_width, bench.sizes.seconds / 20)

    def run() -> float:
        return product.flops / product.seconds()

    return bench.measure(f"products {dtype}", FigureUnit.FLOPS, run)


def measure_copies(bench: Bench, transfer: DeviceTransfer) -> tuple[Figure, Figure]:
    """Measure the bytes per second of uploads and of downloads, between a pool's memory and the
    device; return both figures in this order.
    """

    def figure(name: str, copy: Callable[[], object]) -> Figure:
        def run() -> float:
            return rate(host.nbytes, copy)

        return bench.measure(name, FigureUnit.BYTES_PER_S, run)

    with (
        Pool(bench.sizes.copy_bytes, budget=Budget(), device=transfer.device) as pool,
        pool.lease(pool.capacity_bytes, what="copies") as lease,
        transfer.allocate(lease.nbytes, "copies") as buffer,
    ):
        host = lease.tensor(torch.uint8).fill_(1)
        return (
            figure("copy to device", lambda: buffer.fill(host).wait()),
            figure("copy to host", lambda: transfer.read(buffer.use(), host, "copies").wait()),
        )
