"""The gradients of a prepared model that is not sharded, and host memory for gradients.

On the CPU a gradient stays where autograd has allocated it, which is host memory too: only its
bytes are counted. Gradients that the budget has no room for are spilled to the store when they
arrive (`spill.py`); a handle takes the place of `param.grad`, and what later backward passes
accumulate is added to the values in the store. A gradient that other code holds a reference to is
not spilled: what that code does to it must have its effect.

On a device each is downloaded to its gradient buffer as soon as it is final, on a side stream, and
the device's tensor is dropped. What later passes add goes to a staging buffer and is added on the
host, with the bits of torch's own sum on the device. For user code a gradient is an ordinary host
tensor that belongs to its holder; no code gets one whose bytes are still in flight. Spilled ones go
to the store from there.

Autograd calls `arrived` from its own threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.core.errors import ConfigError, StateError
from offload.core.locks import steadfast
from offload.core.metrics import Metrics
from offload.core.pool import PIECE_ALIGN, Pool
from offload.core.tensors import has_grad_to_itself, holders
from offload.core.ticket import Ticket
from offload.device.device import DeviceTransfer
from offload.optim.gradient_handle import GradientHandle
from offload.optim.staging import HostSum, StagedSums, StagingBuffer, TakeIn, equal_parts
from offload.params.placeholder import own_grad, set_own_grad
from offload.params.spill import SpillArea
from offload.params.spilled_gradient import SpilledGradientValues
from offload.planning.layout import round_up
from offload.storage.disk import DiskStore
from offload.storage.handout import Outgoing

STAGING_PLACES = 3
STAGING_MOST_BYTES = 32 << 20  # of one staging buffer; a larger gradient passes in parts
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
        memory = pool.lease(self.staging_bytes, what=what).tensor()
        return SpillArea(store, memory, self.room_bytes, metrics, self.params)


def gradient_memory(params: Mapping[int, Tensor], pool: Pool) -> dict[int, Tensor]:
    """Allocate the flat gradient buffers in host memory of some parameters, by number."""
    found: dict[int, Tensor] = {}
    if params:
        nbytes = sum(map(place_bytes, params.values()))
        with pool.lease(nbytes, what="gradients") as lease:
            begin = 0
            for number, param in params.items():
                found[number] = lease.tensor(param.dtype, param.numel(), begin)
                begin += place_bytes(param)
    return found


class Gradients:
    """The gradients of the given parameters, by number, on the CPU. area: where those of its
    parameters are spilled to. Any thread, one at a time.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        metrics: Metrics,
        names: Mapping[Tensor, str],
        area: SpillArea | None = None,
    ) -> None:
        self._params = params
        self._metrics = metrics
        self._names = names
        self.area = area

    def end_backward(self) -> None:
        """Collect the spill writes that have ended. Gradients are in place or in flight."""
        if self.area is not None:
            self.area.poll()

    def exposed(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Make the gradients of these parameters visible at `param.grad` while the block runs; on
        the CPU they always are.
        """
        return nullcontext()

    def arrived(self, number: int) -> None:
        """Take in a parameter's gradient after autograd has accumulated to it: spill it if it is to
        be spilled. If it is in the store already, autograd has accumulated there, and nothing is
        left to do.
        """
        param = self._params[number]
        if self.area is None or not self.area.takes(param) or not _can_be_spilled(param):
            return
        if not has_grad_to_itself(param):
            self._leave(param)
            return
        spilled = SpilledGradientValues.make(self.area, id(param), self._names[param], param)
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
            f"that of {self._names[param]} stays in memory, beyond host_memory: something else "
            "holds it or shares its memory (a view, another parameter, a hook that keeps it)",
        )

    def return_to_model(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Load each spilled gradient into memory that `make` gives, set it as `param.grad`, and
        close the area.
        """
        if self.area is None:
            return
        self.area.close(make)
        for param in self._params.values():
            if isinstance(param.grad, GradientHandle):
                param.grad = param.grad.here


class DeviceGradients:
    """The host gradients of one model's device parameters.

    params: those for which autograd calls `arrived`, by number.
    places: gradient buffers in host memory; parameters without one have their gradients in memory
    of torch's.
    area: where the gradients of its parameters are spilled to.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        places: Mapping[int, Tensor],
        pool: Pool,
        transfer: DeviceTransfer,
        metrics: Metrics,
        names: Mapping[Tensor, str],
        area: SpillArea | None = None,
    ) -> None:
        self._params = params
        self._places = {params[number]: place for number, place in places.items()}
        self._names = names
        self.area = area
        self._transfer = transfer
        self._metrics = metrics
        self._sums: dict[Tensor, Tensor] = {}  # by parameter: its gradient
        self._arriving: dict[Tensor, HostSum] = {}  # downloads straight to the gradient
        self._exposed: set[Tensor] = set()  # their gradients are on the device
        self._lock = threading.RLock()
        spilled = [p for p in params.values() if area is not None and area.takes(p)]
        self._slot_bytes = _staging_buffer_bytes([*self._places, *spilled])
        self._slots: list[StagingBuffer] = []  # staging buffers that are free
        for _ in range(STAGING_PLACES if self._slot_bytes else 0):
            slot = pool.lease(self._slot_bytes, what="gradients to be added").tensor()
            self._slots.append(StagingBuffer(slot))
        self._coming = StagedSums(self._slots.pop, self._slots.append, STAGING_PLACES)

    # --- during backward --------------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """Take in a parameter's gradient that autograd has computed, or added to, on this thread's
        current stream.
        """
        param = self._params[number]
        with self._lock:
            if param not in self._exposed:
                self._take(param)

    @steadfast  # an interrupted transfer would be added once more, as a whole
    def _take(self, param: Tensor) -> None:
        """Move the gradient that autograd has left at the parameter to host memory."""
        grad = own_grad(param)
        if grad is None:
            return
        if grad.requires_grad:
            set_own_grad(param, None)
            raise StateError(
                "backward(create_graph=True): the gradients of a model that is prepared for a "
                "device go to host memory and have no graph there; leave create_graph out, or take "
                "a plain model for second derivatives"
            )
        self._coming.finish_what_has_ended()
        held = self._sums.get(param)
        if held is None:
            self._begin(param, grad.detach())
        else:
            self._add(param, held, grad.detach())
        set_own_grad(param, None)

    def _begin(self, param: Tensor, grad: Tensor) -> None:
        if not _is_plain(grad, param.dtype):
            self._sums[param] = grad.cpu()
            return
        if self.area is not None and self.area.takes(param) and grad.numel():
            spilled = SpilledGradientValues.make(self.area, id(param), self._names[param], param)
            if spilled is not None:
                self._sums[param] = self.area.show(param, spilled)
                self._stage(param, spilled.fill, spilled.parts, grad)
                return
        place = self._places.get(param)
        if place is None or holders(place) > 1:
            if place is not None:
                self._metrics.count("gradients_outside_of_their_place")
            place = self._transfer.pinned(grad.numel(), grad.dtype)
        self._sums[param] = place.view(grad.shape)
        if grad.numel():
            ticket = self._read(grad.contiguous().view(-1), place)
            self._arriving[param] = HostSum(place, ticket)

    def _add(self, param: Tensor, held: Tensor, grad: Tensor) -> None:
        plain = _is_plain(grad, held.dtype) and _is_plain(held, grad.dtype)
        away = held.put_away() if isinstance(held, GradientHandle) else held
        if not plain or not held.is_contiguous() or not self._slot_bytes or away is None:
            self._settle_one(param)
            with torch.no_grad():
                held.add_(grad.cpu())
        elif isinstance(away, SpilledGradientValues):
            self._stage(param, away.add, away.parts, grad)
        else:
            # Downloads run in order: before its first addend the gradient itself has arrived.
            held = held.detach().view(-1)
            self._stage(param, HostSum(held).add, partial(equal_parts, held.numel()), grad)

    def _stage(
        self,
        param: Tensor,
        take_in: TakeIn,
        cut: Callable[[int], Iterable[tuple[int, int]]],
        grad: Tensor,
    ) -> None:
        """Download a gradient by way of the staging buffers. cut: into parts of so many elements at
        most.
        """
        parts = cut(self._slot_bytes // grad.element_size())
        self._coming.add(take_in, grad.contiguous().view(-1), parts, self._read, param)

    def _read(self, source: Tensor, host: Tensor) -> Ticket[Tensor]:
        return self._transfer.read(source, host, "a gradient")

    # --- waiting ----------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Wait until every gradient is in host memory, as a whole."""
        with self._lock:
            self._coming.finish()
            for param in list(self._arriving):
                self._await(param)
            if self.area is not None:
                self.area.poll()

    def _settle_one(self, param: Tensor) -> None:
        self._coming.finish_those_of(param)
        self._await(param)

    def _await(self, param: Tensor) -> None:
        arriving = self._arriving.get(param)
        if arriving is None:
            return
        try:
            arriving.settle()
        finally:
            if arriving.ticket is None:  # it has come, or failed
                self._arriving.pop(param, None)

    # --- gradients as user code sees them ---------------------------------------------------------

    def of(self, param: Tensor) -> Tensor | None:
        """Return a parameter's gradient, in host memory, once all of it is there."""
        with self._lock:
            if param in self._exposed:
                return own_grad(param)
            self._take(param)  # autograd may not have called `arrived` for it
            self._settle_one(param)
            return self._sums.get(param)

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Set a parameter's gradient, or clear it."""
        check_like("grad", param, grad)
        with self._lock:
            self._settle_one(param)
            set_own_grad(param, None)
            self._sums.pop(param, None)
            if grad is not None:
                self._sums[param] = grad if grad.is_cpu else grad.cpu()

    @contextmanager
    def exposed(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Keep the gradients of these parameters on the device, beside the exposed parameters,
        inside the `with`.
        """
        fresh = [param for param in params if param not in self._exposed]
        for param in fresh:
            held = self.of(param)
            self._exposed.add(param)
            if held is not None:
                set_own_grad(param, held.to(self._transfer.device))
        try:
            yield
        finally:
            for param in fresh:
                self._take_back_to_original(param)

    def _take_back_to_original(self, param: Tensor) -> None:
        with self._lock:
            self._exposed.discard(param)
            grad, held = own_grad(param), self._sums.get(param)
            if grad is None:
                self._sums.pop(param, None)
            elif held is not None and held.shape == grad.shape and held.dtype == grad.dtype:
                held.detach().copy_(grad.detach())  # holders of the tensor see the change
            else:
                self._sums[param] = grad.detach().cpu()
            set_own_grad(param, None)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(self, params: Sequence[Tensor]) -> None:
        """Take over the gradients that these parameters have already."""
        for param in params:
            grad = param.grad
            if grad is not None:
                self._sums[param] = grad if grad.is_cpu else grad.cpu()
                param.grad = None

    def return_to_model(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Leave every parameter, which is an ordinary one again, with its gradient; spilled ones in
        memory that `make` returns.
        """
        with self._lock:
            self.end_backward()
            if self.area is not None:
                self.area.close(make)
            for param, grad in self._sums.items():
                here = grad.here if isinstance(grad, GradientHandle) else grad
                param.grad = None if here is None else here.to(param.device)
            self._sums.clear()
            self._places.clear()  # live graphs still hold this object
            self._slots.clear()


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


def place_bytes(param: Tensor) -> int:
    """Return the aligned size of one parameter's gradient buffer."""
    return round_up(param.numel() * param.element_size(), _ALIGN_BYTES)


def check_like(what: str, param: Tensor, grad: Tensor | None) -> None:
    """Raise `ConfigError` for a gradient that is not of the parameter's shape and dtype."""
    if grad is not None and (grad.shape != param.shape or grad.dtype != param.dtype):
        raise ConfigError(
            f"{what}: expected {tuple(param.shape)} of {param.dtype}, as the parameter is, got "
            f"{tuple(grad.shape)} of {grad.dtype}"
        )


def _is_plain(grad: Tensor, dtype: torch.dtype) -> bool:
    return grad.layout == torch.strided and grad.dtype == dtype


def staging_bytes(params: Sequence[Tensor]) -> int:
    """Return the host memory that the staging buffers take for gradients of these parameters."""
    return STAGING_PLACES * round_up(_staging_buffer_bytes(params), PIECE_ALIGN)


def _staging_buffer_bytes(params: Sequence[Tensor]) -> int:
    largest = max((param.numel() * param.element_size() for param in params), default=0)
    return min(largest, STAGING_MOST_BYTES)
