"""The gradients of a prepared model on the CPU, and places in host memory for gradients.

On the CPU a gradient stays where autograd has made it, which is host memory as good as any: only
its bytes are counted. Those that the budget has no room for have a place on a mapped file: true
host memory as well, but its pages are pushed out to the drive when they have been written, and when
the update has read them. What later backward passes bring is added there. A gradient belongs to
whoever holds the tensor: as long as somebody keeps an old one, its place is not used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.holders import holders
from offload.metrics import Metrics
from offload.pool import Pool
from offload.store.mapped import MappedFile
from offload.units import Unit

PIECE_BYTES = 16 << 20  # written to a place on disk before they are pushed out
_ALIGN_BYTES = 64

_MakePlace = Callable[[torch.dtype, int, int], Tensor]  # of type, elements and first byte


@dataclass(frozen=True)
class Spill:
    """The gradients of these parameters are on disk, in these directories by turns."""

    params: frozenset[Tensor] = frozenset()
    directories: Sequence[Path] = ()


class Places:
    """Flat host memory for the gradients of some parameters, by number. pool: of those that are not
    on disk; None: they have no place.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        pool: Pool | None,
        metrics: Metrics,
        spill: Spill | None = None,
    ) -> None:
        self._metrics = metrics
        self.by_number: dict[int, Tensor] = {}
        self._files: list[tuple[int, MappedFile]] = []  # with the address where each begins
        spill = spill or Spill()
        here = {number: param for number, param in params.items() if param not in spill.params}
        if here and pool is not None:
            with pool.lease(gradient_bytes(here), what="gradients") as lease:
                self._cut(here, lease.tensor)
        there = [number for number in params if number not in here]
        for turn, directory in enumerate(spill.directories):
            self._map({n: params[n] for n in there[turn :: len(spill.directories)]}, directory)

    def _map(self, params: Mapping[int, Tensor], directory: Path) -> None:
        if params:
            nbytes = gradient_bytes(params)
            file = MappedFile(directory, nbytes, "gradients that host_memory has no room for")
            self._files.append((file.address, file))
            self._cut(params, file.tensor)

    def _cut(self, params: Mapping[int, Tensor], make: _MakePlace) -> None:
        begin = 0
        for number, param in params.items():
            self.by_number[number] = make(param.dtype, param.numel(), begin)
            begin += place_bytes(param)

    def push_out(self, values: Tensor) -> None:
        """A gradient, or a part of one, has been read: if its place is on disk, its pages go."""
        self._let_go(values)

    def write_out(self, values: Tensor) -> None:
        """The same of one that has been written, which counts."""
        if self._let_go(values):
            self._metrics.count("spilled_bytes", values.nbytes)

    def _let_go(self, values: Tensor) -> bool:
        """Whether its place is on disk."""
        address = values.data_ptr() if self._files else 0
        for begin, file in self._files:
            if begin <= address < begin + file.nbytes:
                file.push_out(address - begin, values.nbytes)
                return True
        return False


class Gradients:
    """Of these parameters, by number, on the CPU. One thread at a time."""

    def __init__(
        self, params: Mapping[int, Tensor], metrics: Metrics, spill: Spill | None = None
    ) -> None:
        self._params = params
        self._metrics = metrics
        self._places = Places(params, None, metrics, spill)

    def begin(self) -> None:
        """A backward pass begins. Here that makes no difference."""

    def visited(self, unit: Unit) -> None:
        """Backward has reached a unit. Here that makes no difference."""

    def settle(self) -> None:
        """They are where they should be already."""

    @contextmanager
    def lent(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Gradients of these can be seen beside their parameters; they always can."""
        yield

    def arrived(self, number: int) -> None:
        """Autograd has added to a parameter's gradient."""
        place = self._places.by_number.get(number)
        if place is None:
            return
        param = self._params[number]
        grad = param.grad
        if grad is None or not grad.numel():
            return
        if grad.data_ptr() == place.data_ptr():
            self._places.write_out(grad)
            return
        if grad.layout != torch.strided or grad.dtype != place.dtype:
            return  # not to be kept in a place that was measured for another
        if holders(place) > 1:
            self._metrics.count("gradients_outside_of_their_place")
            return
        param.grad = self._take_in(place.view(grad.shape), grad)

    def _take_in(self, place: Tensor, grad: Tensor) -> Tensor:
        if not grad.is_contiguous():
            place.copy_(grad)
            self._places.write_out(place)
            return place
        source, target = grad.view(-1), place.view(-1)
        step = PIECE_BYTES // place.element_size()
        for begin in range(0, place.numel(), step):  # few pages at a time
            target[begin : begin + step].copy_(source[begin : begin + step])
            self._places.write_out(target[begin : begin + step])
        return place

    def push_out(self, values: Tensor) -> None:
        """The update has read them."""
        self._places.push_out(values)


def gradient_bytes(params: Mapping[int, Tensor]) -> int:
    """Of places for the gradients of all these."""
    return sum(map(place_bytes, params.values()))


def place_bytes(param: Tensor) -> int:
    """Of the place for one parameter's gradient."""
    return -(-param.numel() * param.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
