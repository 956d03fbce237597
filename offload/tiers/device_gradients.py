"""The gradients of parameters that are used on a device: in host memory, from the moment that
autograd has made them.

Each is copied to its place as soon as it is final, on a side stream, and the device's is dropped.
What later passes bring goes to a staging place and is added on the host, in the order in which it
arrived and in the gradient's own type: the bits that torch's own sum on the device has. Seen from
outside a gradient is an ordinary host tensor, that belongs to whoever holds it; nobody sees one
whose bytes are still under way.

Autograd calls `arrived` from its own threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import ConfigError, StateError
from offload.guard import own_grad, set_own_grad
from offload.holders import holders
from offload.metrics import Metrics
from offload.pool import PIECE_ALIGN, Pool
from offload.ticket import Ticket
from offload.tiers.gradients import Places
from offload.transfer import DeviceTransfer
from offload.units import Unit

STAGING_PLACES = 3
STAGING_MOST_BYTES = 32 << 20  # of one place; a larger gradient passes in parts


def staging_bytes(params: Sequence[Tensor]) -> int:
    """Host memory for what is to be added to the gradients of these."""
    return STAGING_PLACES * (-(-_place_bytes(params) // PIECE_ALIGN) * PIECE_ALIGN)


def _place_bytes(params: Sequence[Tensor]) -> int:
    largest = max((param.numel() * param.element_size() for param in params), default=0)
    return min(largest, STAGING_MOST_BYTES)


@dataclass
class _Addend:
    """A part of a gradient, on its way to a staging place, that is to be added to `target`.
    is_first: there is nothing yet to add it to.
    """

    param: Tensor
    target: Tensor
    values: Tensor
    slot: Tensor
    ticket: Ticket[Tensor]
    is_first: bool


class DeviceGradients:
    """Of one model. params: those that autograd tells of, by number. places: host memory for their
    gradients. Others have their gradients in memory of torch's.
    """

    def __init__(
        self,
        params: Mapping[int, Tensor],
        places: Places,
        pool: Pool,
        transfer: DeviceTransfer,
        metrics: Metrics,
    ) -> None:
        self._params = params
        self._places = {params[number]: place for number, place in places.by_number.items()}
        self._on_disk = {p for p, place in self._places.items() if not _is_pinned(place)}
        self.push_out, self._write_out = places.push_out, places.write_out
        self._transfer = transfer
        self._metrics = metrics
        self._sums: dict[Tensor, Tensor] = {}  # by parameter: its gradient
        self._arriving: dict[Tensor, Ticket[Tensor]] = {}  # copies to where the gradient is
        self._addends: deque[_Addend] = deque()
        self._lent: set[Tensor] = set()  # their gradients are on the device
        self._lock = threading.RLock()
        self._slot_bytes = _place_bytes(list(self._places))
        self._slots: list[Tensor] = []  # staging places that are free
        for _ in range(STAGING_PLACES if self._slot_bytes else 0):
            with pool.lease(self._slot_bytes, what="gradients to be added") as lease:
                self._slots.append(lease.tensor())

    # --- during backward --------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass begins. Here that makes no difference."""

    def visited(self, unit: Unit) -> None:
        """Backward has reached a unit. Here that makes no difference."""

    def arrived(self, number: int) -> None:
        """Autograd has made a parameter's gradient, or added to it, on this thread's current
        stream.
        """
        param = self._params[number]
        with self._lock:
            if param not in self._lent:
                self._take(param)

    def _take(self, param: Tensor) -> None:
        """Move what autograd has left at the parameter to host memory."""
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
        self._finish_what_has_come()
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
        place = self._places.get(param)
        if place is None or holders(place) > 1:
            if place is not None:
                self._metrics.count("gradients_outside_of_their_place")
            place = self._transfer.pinned(grad.numel(), grad.dtype)
        self._sums[param] = place.view(grad.shape)
        if param in self._on_disk and place is self._places[param]:
            self._stage(param, self._sums[param], grad, is_first=True)
        elif grad.numel():
            self._arriving[param] = self._read(grad.contiguous().view(-1), place)

    def _add(self, param: Tensor, held: Tensor, grad: Tensor) -> None:
        plain = _is_plain(grad, held.dtype) and _is_plain(held, grad.dtype)
        if not plain or not held.is_contiguous() or not self._slot_bytes:
            self._settle_one(param)
            with torch.no_grad():
                held.add_(grad.cpu())
            return
        self._stage(param, held, grad, is_first=False)

    def _stage(self, param: Tensor, held: Tensor, grad: Tensor, is_first: bool) -> None:
        """Bring a gradient to `held` by way of the staging places."""
        source, target = grad.contiguous().view(-1), held.detach().view(-1)
        step = self._slot_bytes // grad.element_size()
        for begin in range(0, grad.numel(), step):
            if not self._slots:
                self._finish_oldest()
            part, slot = slice(begin, begin + step), self._slots.pop()
            values = slot.view(grad.dtype)[: source[part].numel()]
            ticket = self._read(source[part], values)
            self._addends.append(_Addend(param, target[part], values, slot, ticket, is_first))

    def _read(self, source: Tensor, host: Tensor) -> Ticket[Tensor]:
        return self._transfer.read(source, host, "a gradient")

    # --- waiting ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every gradient is in host memory, as a whole."""
        with self._lock:
            while self._addends:
                self._finish_oldest()
            for param in list(self._arriving):
                self._await(param)

    def _settle_one(self, param: Tensor) -> None:
        while any(addend.param is param for addend in self._addends):
            self._finish_oldest()
        self._await(param)

    def _finish_what_has_come(self) -> None:
        while self._addends and self._addends[0].ticket.done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        addend = self._addends.popleft()
        addend.ticket.wait()  # copies run in their order: what it is added to has come, too
        with torch.no_grad():
            if addend.is_first:
                addend.target.copy_(addend.values)
            else:
                addend.target.add_(addend.values)
        self._write_out(addend.target)
        self._slots.append(addend.slot)

    def _await(self, param: Tensor) -> None:
        ticket = self._arriving.pop(param, None)
        if ticket is not None:
            ticket.wait()
            self._write_out(self._sums[param])

    # --- seen from outside ------------------------------------------------------------------------

    def of(self, param: Tensor) -> Tensor | None:
        """A parameter's gradient, in host memory, once all of it is there."""
        with self._lock:
            if param in self._lent:
                return own_grad(param)
            self._take(param)  # of a parameter that nobody told of
            self._settle_one(param)
            return self._sums.get(param)

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Another gradient for a parameter, or none."""
        if grad is not None and (grad.shape != param.shape or grad.dtype != param.dtype):
            raise ConfigError(
                f"grad: expected {tuple(param.shape)} of {param.dtype}, as the parameter is, got "
                f"{tuple(grad.shape)} of {grad.dtype}"
            )
        with self._lock:
            self._settle_one(param)
            set_own_grad(param, None)
            self._sums.pop(param, None)
            if grad is not None:
                self._sums[param] = grad if grad.is_cpu else grad.cpu()

    @contextmanager
    def lent(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the gradients of these are on the device, where their parameters are seen."""
        fresh = [param for param in params if param not in self._lent]
        for param in fresh:
            held = self.of(param)
            self._lent.add(param)
            if held is not None:
                set_own_grad(param, held.to(self._transfer.device))
        try:
            yield
        finally:
            for param in fresh:
                self._take_home(param)

    def _take_home(self, param: Tensor) -> None:
        with self._lock:
            self._lent.discard(param)
            grad, held = own_grad(param), self._sums.get(param)
            if grad is None:
                self._sums.pop(param, None)
            elif held is not None and held.shape == grad.shape and held.dtype == grad.dtype:
                held.detach().copy_(grad.detach())  # whoever holds it sees what was done to it
            else:
                self._sums[param] = grad.detach().cpu()
            set_own_grad(param, None)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(self, params: Sequence[Tensor]) -> None:
        """Gradients that these have already."""
        for param in params:
            grad = param.grad
            if grad is not None:
                self._sums[param] = grad if grad.is_cpu else grad.cpu()
                param.grad = None

    def give_back(self) -> None:
        """Leave every parameter, which is an ordinary one again, with its gradient."""
        with self._lock:
            self.settle()
            for param, grad in self._sums.items():
                param.grad = grad.to(param.device)
            self._sums.clear()
            self._places.clear()  # graphs that are still there hold us
            self._slots.clear()


def _is_pinned(place: Tensor) -> bool:
    """Whether copies to it need not wait; on a mapped file they would."""
    return not place.numel() or place.is_pinned()


def _is_plain(grad: Tensor, dtype: torch.dtype) -> bool:
    return grad.layout == torch.strided and grad.dtype == dtype
