"""Host memory for the gradients of a prepared model: each parameter's has its place.

When autograd has made a gradient it moves to its place in the pool, and what later backward passes
bring is added to it there. It is an ordinary tensor, and belongs to whoever holds it: as long as
somebody keeps an old one, its place is not used again, and the new one stays where autograd made
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.holders import holders
from offload.metrics import Metrics
from offload.pool import Pool

_ALIGN_BYTES = 64


class Gradients:
    """Places for the gradients of these parameters, by number. One thread at a time."""

    def __init__(self, params: Mapping[int, Tensor], pool: Pool, metrics: Metrics) -> None:
        self._params = params
        self._metrics = metrics
        self._places = make_places(params, pool)
        self._addresses = {place.data_ptr() for place in self._places.values()}

    def settle(self) -> None:
        """They are where they should be already."""

    @contextmanager
    def lent(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Gradients of these can be seen beside their parameters; they always can."""
        yield

    def arrived(self, number: int) -> None:
        """Autograd has added to a parameter's gradient."""
        param, place = self._params[number], self._places[number]
        grad = param.grad
        if grad is None or not grad.numel() or grad.data_ptr() in self._addresses:
            return
        if grad.layout != torch.strided or grad.dtype != place.dtype:
            return  # not to be kept in a place that was measured for another
        if holders(place) > 1:
            self._metrics.count("gradients_outside_of_their_place")
            return
        param.grad = place.view(grad.shape).copy_(grad)


def make_places(params: Mapping[int, Tensor], pool: Pool) -> dict[int, Tensor]:
    """Host memory for the gradient of each of these, flat."""
    places: dict[int, Tensor] = {}
    if not params:
        return places
    begin = 0
    with pool.lease(gradient_bytes(params), what="gradients") as lease:
        for number, param in params.items():
            places[number] = lease.tensor(param.dtype, param.numel(), begin)
            begin += _round_up(places[number].nbytes)
    return places


def gradient_bytes(params: Mapping[int, Tensor]) -> int:
    """Of places for the gradients of all these."""
    return sum(_round_up(param.numel() * param.element_size()) for param in params.values())


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
