"""The gradients of a prepared model on the CPU, and places in host memory for gradients.

On the CPU a gradient stays where autograd has made it, which is host memory as good as any: only
its bytes are counted. Those that the budget has no room for go to the store as they come
(`spill.py`); autograd finds a handle in their place, and what later backward passes bring is added
where the values are. One that somebody else holds stays where it is: what is done to it there must
count.
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
from offload.optim.spilled_gradient import SpilledGradient
from offload.params.spill import SpillArea, Spilled
from offload.planning.unit import Unit
from offload.storage.disk import DiskStore
from offload.storage.memory import MemoryStore
from offload.storage.outgoing import Outgoing

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Spill:
    """The gradients of these parameters are in the store. staging_bytes: of host memory that they
    pass through. room_bytes: that they have in the store.
    """

    params: frozenset[Tensor] = frozenset()
    staging_bytes: int = 0
    room_bytes: int = 0

    def open(
        self, pool: Pool, store: DiskStore | MemoryStore | None, metrics: Metrics
    ) -> SpillArea | None:
        """None: nothing is spilled."""
        return open_area(pool, store, self.staging_bytes, self.room_bytes, metrics)


def open_area(
    pool: Pool,
    store: DiskStore | MemoryStore | None,
    staging_bytes: int,
    room_bytes: int,
    metrics: Metrics,
) -> SpillArea | None:
    if not staging_bytes:
        return None
    assert store is not None, "nothing is spilled without a disk"
    with pool.lease(staging_bytes, what="gradients on their way to disk and back") as lease:
        return SpillArea(store, lease.tensor(), room_bytes, metrics)


class GradMemory:
    """Flat host memory for the gradients of some parameters, by number."""

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
    """Of these parameters, by number, on the CPU. area: where those of `spilled` go. One thread at
    a time.
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

    def begin(self) -> None:
        """A backward pass begins. Here that makes no difference."""

    def visited(self, unit: Unit) -> None:
        """Backward has reached a unit. Here that makes no difference."""

    def settle(self) -> None:
        """They are where they should be already, or on their way."""
        if self.area is not None:
            self.area.poll()

    @contextmanager
    def exposed(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Gradients of these can be seen beside their parameters; they always can."""
        yield

    def arrived(self, number: int) -> None:
        """Autograd has added to a parameter's gradient; to one that is spilled it has done so where
        the values are.
        """
        param = self._params[number]
        if param not in self._spilled or not _can_be_spilled(param):
            return
        if not has_grad_to_itself(param):
            self._leave(param)
            return
        spilled = spill(self.area, param, self._name_of(param), self._metrics)
        if spilled is not None:
            assert self.area is not None and param.grad is not None
            spilled.take(param.grad)
            param.grad = self.area.show(param, spilled)

    def _leave(self, param: Tensor) -> None:
        """Its gradient is memory of the user's."""
        self._metrics.count("gradients_outside_of_their_place")
        self._metrics.fall_back(
            "gradients on disk",
            f"that of {self._name_of(param)} stays in memory, beyond host_memory: something else "
            "holds it or shares its memory (a view, another parameter, a hook that keeps it)",
        )

    def cut_for(self, slices: Mapping[Tensor, Sequence[tuple[int, int]]]) -> None:
        """Cut spilled gradients as the update will ask for them."""
        if self.area is not None:
            for param, each in slices.items():
                self.area.cut(param, param.numel(), [at for one in each for at in one])

    def give_back(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Leave every parameter with its gradient, in memory that `make` gives."""
        if self.area is None:
            return
        self.area.close(make)
        for param in self._spilled:
            if isinstance(param.grad, SpilledGradient):
                param.grad = param.grad.here


def spill(area: SpillArea | None, param: Tensor, name: str, metrics: Metrics) -> Spilled | None:
    """Room for a parameter's gradient; None: it stays in memory, since somebody keeps an older one
    in its place.
    """
    assert area is not None, "made where gradients are spilled"
    made = area.make(param, name, param.numel(), param.dtype, param.shape)
    if made is None:
        metrics.count("gradients_outside_of_their_place")
    return made


def _can_be_spilled(param: Tensor) -> bool:
    """Whether its gradient is in memory, and what a place in the store was measured for."""
    grad = param.grad
    return (
        grad is not None
        and not isinstance(grad, SpilledGradient)
        and grad.numel() > 0
        and grad.layout == torch.strided  # a sparse one is refused by name at step()
        and grad.dtype == param.dtype
        and not grad.requires_grad
    )


def gradient_bytes(params: Mapping[int, Tensor]) -> int:
    """Of places for the gradients of all these."""
    return sum(map(place_bytes, params.values()))


def place_bytes(param: Tensor) -> int:
    """Of the place for one parameter's gradient."""
    return -(-param.numel() * param.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
