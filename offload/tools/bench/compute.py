"""How fast large products are, where models are computed: on the accelerator, or the cores."""

from __future__ import annotations

import time

import torch

from offload.device import DeviceTransfer, Transfer
from offload.tools.bench.figure import Figure, FigureUnit, Listener, repeat
from offload.tools.bench.sizes import BenchSizes

DTYPES = ("float32", "bfloat16")
_LEAST_WIDTH = 512  # smaller ones are no large products
_TRIES = 3  # the best of them tells how long a run takes
_MOST_PRODUCTS = 1000  # of one run


class Product:
    """Products of square matrices, `count` in one run; `width` and `count` are found so that a run
    takes about `run_s`.
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
        """Of one run."""
        return 2.0 * self.width**3 * self.count

    def _make(self) -> float:
        """Matrices of the present width; the seconds of their product."""
        device = self._transfer.device
        shape = self.width, self.width
        # Not random: the generators of whoever calls stay as they are.
        self._left = torch.full(shape, 0.5, dtype=self._dtype, device=device)
        self._right = torch.full(shape, 0.25, dtype=self._dtype, device=device)
        self._out = torch.empty(shape, dtype=self._dtype, device=device)
        self.seconds()  # the first one prepares things
        return min(self.seconds() for _ in range(_TRIES))

    def seconds(self) -> float:
        """Of one run, until the result is there."""
        begin_s = time.perf_counter()
        for _ in range(self.count):
            torch.mm(self._left, self._right, out=self._out)
        self._arrive()
        return time.perf_counter() - begin_s

    def _arrive(self) -> None:
        """A device is waited for by reading some of what it has made last."""
        if isinstance(self._transfer, DeviceTransfer):
            some = self._out[0].contiguous()
            host = self._transfer.pinned(some.numel(), some.dtype)
            self._transfer.read(some, host, "the end of a product").wait()


def measure_product(
    dtype: str, transfer: Transfer, sizes: BenchSizes, listener: Listener
) -> Figure:
    """Floating-point operations a second."""
    name = f"products {dtype}"
    listener.begin(name)
    product = Product(dtype, transfer, sizes.product_width, sizes.seconds / 20)
    rates = repeat(lambda: product.flops / product.seconds(), sizes.runs, listener.at)
    figure = Figure.of(name, FigureUnit.FLOPS, rates)
    listener.done(figure)
    return figure
