"""The gradients of a prepared model on the CPU, and host memory for gradients.

On the CPU a gradient stays where autograd has allocated it, which is host memory too: only its
bytes are counted. Gradients that the budget has no room for are spilled to the store when they
arrive (`spill.py`); a handle takes the place of `param.grad`, and what later backward passes
accumulate is added to the values in the store. A gradient that other code holds a reference to is
not spilled: what that code does to it must have its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.core.holders import has_grad_to_itself
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.optim.gradient_handle import GradientHandle
from offload.params.spill import SpillArea
from offload.params.spilled_gradient import SpilledGradientValues
from offload.storage.disk import DiskStore
from offload.storage.outgoing import Outgoing

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class SpilledGradientParams:
    """The parameters whose gradients are spilled, and the memory that this takes.

    staging_bytes: host memory that the gradients pass through. room_bytes: what they take in the
    store.
    """

    params: frozenset[Tensor] = frozenset()
    staging_bytes: int = 0
    room_bytes: int = 0

    def open(self, pool: Pool, store: DiskStore | None, metrics: Metrics) -> SpillArea | None:
        """Open the area that these gradients are spilled to; return None if none is."""
        if not self.staging_bytes:
            return None
        assert store is not None, "nothing is spilled without a disk"
        what = "gradients on their way to disk and back"
        with pool.lease(self.staging_bytes, what=what) as lease:
            return SpillArea(store, lease.tensor(), self.room_bytes, metrics)


class GradMemory:
    """The flat gradient buffers in host memory of some parameters, by number."""

    def __init__(self, params: Mapping[int, Tensor], pool: Pool) -> None:
        self.by_number: dict[int, Tensor] = {}
        if not params:
            return
        with pool.lease(gradient_bytes(params), what="gradients") as lease:
            begin = 0
            for number, param in params.items():
                self.by_number[number] = lease.tensor(param.dtype, param.numel(), begin)
                begin += place_bytes(param)


class Gradients:
    """The gradients of the given parameters, by number, on the CPU.

    spilled: the parameters whose gradients are spilled. area: where they are spilled to. Any
    thread, one at a time.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        metrics: Metrics,
        name_of: Callable[[Tensor], str],
        spilled: frozenset[Tensor] = frozenset(),
        area: SpillArea | None = None,
    ) -> None:
        self._params = params
        self._metrics = metrics
        self._name_of = name_of
        self._spilled = spilled
        self.area = area

    def end_backward(self) -> None:
        """Collect the spill writes that have ended. Gradients are in place or in flight."""
        if self.area is not None:
            self.area.poll()

    @contextmanager
    def exposed(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Make the gradients of these parameters visible at `param.grad` while the block runs; on
        the CPU they always are.
        """
        yield

    def arrived(self, number: int) -> None:
        """Take in a parameter's gradient after autograd has accumulated to it: spill it if it is to
        be spilled. If it is in the store already, autograd has accumulated there, and nothing is
        left to do.
        """
        param = self._params[number]
        if param not in self._spilled or not _can_be_spilled(param):
            return
        if not has_grad_to_itself(param):
            self._leave(param)
            return
        assert self.area is not None, "made where gradients are spilled"
        spilled = SpilledGradientValues.make(self.area, param, self._name_of(param), param)
        if spilled is not None:
            assert param.grad is not None
            spilled.take(param.grad)
            param.grad = self.area.show(param, spilled)

    def _leave(self, param: Tensor) -> None:
        """Leave a gradient in memory, since the user's code holds a reference to it or shares its
        memory.
        """
        self._metrics.count("gradients_outside_of_their_place")
        self._metrics.fall_back(
            "gradients on disk",
            f"that of {self._name_of(param)} stays in memory, beyond host_memory: something else "
            "holds it or shares its memory (a view, another parameter, a hook that keeps it)",
        )

    def return_to_model(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Load each spilled gradient into memory that `make` gives, set it as `param.grad`, and
        close the area.
        """
        if self.area is None:
            return
        self.area.close(make)
        for param in self._spilled:
            if isinstance(param.grad, GradientHandle):
                param.grad = param.grad.here


def _can_be_spilled(param: Tensor) -> bool:
    """Return whether the gradient is in memory and of the kind that its room in the store was sized
    for.
    """
    grad = param.grad
    return (
        grad is not None
        and not isinstance(grad, GradientHandle)
        and grad.numel() > 0
        and grad.layout == torch.strided  # a sparse one is refused by name at step()
        and grad.dtype == param.dtype
        and not grad.requires_grad
    )


def gradient_bytes(params: Mapping[int, Tensor]) -> int:
    """Return the size of gradient buffers for all these parameters, each aligned."""
    return sum(map(place_bytes, params.values()))


def place_bytes(param: Tensor) -> int:
    """Return the aligned size of one parameter's gradient buffer."""
    return -(-param.numel() * param.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
