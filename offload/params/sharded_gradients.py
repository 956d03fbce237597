"""The gradients of a model that is sharded over ranks, as the user's code sees them in `.grad`.

Each rank has a shard of each unit's gradients (`mean_gradients.py`). The user's code sees a
gradient as a `SlicedGradient` of its parameter's shape; operations on it act on the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError, StateError
from offload.optim.gradient_handle import GradientEdit
from offload.optim.sliced_gradient import SlicedGradient, power_sum
from offload.optim.spilled_gradient import SpilledGradientInput
from offload.params.mean_gradients import MeanGradients, UnitSum, part_of
from offload.params.placeholder import own_grad, set_own_grad
from offload.storage.outgoing import Outgoing


class ShardedGradients(MeanGradients):
    """The sharded gradients of one model, with the handles that `.grad` returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views: dict[Tensor, SlicedGradient] = {}
        self._norms: dict[Tensor, float] = {}
        self._exposed: set[Tensor] = set()  # exposed parameters, whose gradients show, too

    def begin(self) -> None:
        """Note that a backward pass begins, and hide the gradients of exposed parameters, so that
        autograd finds none to add to.
        """
        super().begin()
        for param in self._exposed:
            set_own_grad(param, None)

    def _backward_ended(self) -> None:
        self._norms.clear()
        self._show_exposed()

    # --- the user's view --------------------------------------------------------------------------

    def of(self, param: Tensor) -> Tensor | None:
        """Return the handle of a parameter's gradient; None: it has none."""
        with self._lock:
            self._end_what_broke()
            if own_grad(param) is not None and param not in self._exposed:
                raise StateError(
                    f"{self.name_of(param)}: has a gradient, but was frozen when the model was "
                    "prepared: close() and prepare again"
                )
            one = self._sum_of.get(param)
            if one is None or not (param in one.has or param in one.arrived):
                return None
            if param not in self._views:
                self._views[param] = self._view(param)
            return self._views[param]

    def _view(self, param: Tensor) -> SlicedGradient:
        """Make the handle of a gradient. torch wants the gradient of an exposed parameter on the
        parameter's device.
        """
        device = param.device if param in self._exposed else torch.device("cpu")
        return SlicedGradient.of(param, self, device)

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Replace a parameter's gradient by `grad`, or drop it (None). Every rank must pass the
        same.
        """
        with self._lock:
            self._end_what_broke()
            one = self._sum_of.get(param)
            if grad is not None and grad is self._views.get(param):
                return
            if one is None:
                if grad is not None:
                    raise StateError(f"{self.name_of(param)}: was frozen when it was prepared")
                set_own_grad(param, None)
                return
            _check_like(self.name_of(param), param, grad)
            self._drop(one, param)
            if grad is not None:
                self._clear_what_is_gone(one)
                if one.is_empty:
                    self._blank(one)
                    one.is_empty = False
                one.has.add(param)
                first, end = self._sharding.own(one.unit, param)
                self._fill(one, one.members[param], grad.detach().reshape(-1)[first:end])
            self._norms.clear()

    def _drop(self, one: UnitSum, param: Tensor) -> None:
        self._views.pop(param, None)  # a use of the old handle raises from now on
        one.arrived.discard(param)
        if not one.arrived and one.whole is not None:
            one.whole.release()
            one.whole = None
        one.has.discard(param)
        one.gone.add(param)
        if not one.has:
            one.is_empty = True
            one.gone.clear()

    def values_of(self, param: Tensor, gradient: Tensor) -> Tensor:
        with self._lock:
            one = self._checked(param, gradient)
            return self._own(one, one.members[param])

    def source_of(self, param: Tensor, gradient: Tensor) -> Tensor | SpilledGradientInput:
        with self._lock:
            one = self._checked(param, gradient)
            begin, end = self._span(one, one.members[param])
            if one.place is not None or begin == end:
                return self._own(one, one.members[param])
            return self._spilled(one).part(begin, end)

    def _checked(self, param: Tensor, gradient: Tensor) -> UnitSum:
        """Return the unit's sum that holds the gradient. Raises `StateError` if the handle is no
        longer the parameter's gradient, or if it is not reduced yet.
        """
        one = self._sum_of[param]
        if self._views.get(param) is not gradient:
            raise StateError(
                f"{self.name_of(param)}: this gradient has been dropped; ask for .grad again"
            )
        if param in one.arrived:
            raise StateError(
                f"{self.name_of(param)}: its gradient of no_sync() is not reduced yet; run the "
                "last backward pass outside of it"
            )
        return one

    def norm_of(self, param: Tensor, gradient: Tensor, order: float) -> float:
        self._checked(param, gradient)
        if order != 2.0:
            return self._other_norm(param, gradient, order)
        if not self._norms:  # all in one reduction: clipping asks for every norm
            self._norms = dict(zip(*self._all_norms(), strict=True))
        return self._norms[param]

    def _all_norms(self) -> tuple[list[Tensor], list[float]]:
        there = [param for one in self._sums.values() for param in one.members if param in one.has]
        sums = []
        for param in there:
            one = self._sum_of[param]
            values = self._own(one, one.members[param])
            sums.append(kernels.grad_stats(values).sum_squares if values.numel() else 0.0)
        totals = self._ranks.sum(sums, "norms of gradients")
        return there, [math.sqrt(total) for total in totals]

    def _other_norm(self, param: Tensor, gradient: Tensor, order: float) -> float:
        mine = power_sum(self.values_of(param, gradient), order)
        if math.isinf(order):
            each = self._ranks.exchange(mine.hex(), f"norm of {self.name_of(param)}")
            values = [float.fromhex(text) for text in each]
            return math.nan if any(map(math.isnan, values)) else max(values)
        return float(self._ranks.sum([mine], f"norm of {self.name_of(param)}")[0] ** (1 / order))

    def count_of(self, values: Tensor, what: str) -> int:
        return int(self._ranks.sum([float(values.sum())], what)[0])

    def edit(self, param: Tensor, gradient: Tensor, edit: GradientEdit) -> None:
        one = self._checked(param, gradient)
        self._edit(one, one.members[param], edit)
        self._norms.clear()

    def take(self, param: Tensor, gradient: Tensor, whole: Tensor) -> None:
        one = self._checked(param, gradient)
        first, end = self._sharding.own(one.unit, param)
        values = whole.detach().expand(param.shape).reshape(-1)[first:end]
        self._fill(one, one.members[param], values.to(param.dtype))
        self._norms.clear()

    @contextmanager
    def exposed(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Show the gradients of these parameters in `.grad` of the exposed parameters while the
        block runs; then take in what the user's code has put there.
        """
        fresh = [param for param in params if param in self._sum_of and param not in self._exposed]
        for param in fresh:
            self._exposed.add(param)
            self._move_view(param)
        self._show_exposed()
        try:
            yield
        finally:
            for param in fresh:
                self._take_back_to_original(param)

    def _show_exposed(self) -> None:
        for param in self._exposed:
            set_own_grad(param, self.of(param))

    def _take_back_to_original(self, param: Tensor) -> None:
        self._exposed.discard(param)
        grad = own_grad(param)
        set_own_grad(param, None)
        if grad is not self._views.get(param):
            self.put(param, grad)
        self._move_view(param)

    def _move_view(self, param: Tensor) -> None:
        """Drop the handle if the device may change: the gradient of an exposed parameter shows on
        the device, otherwise in host memory.
        """
        if self._gather_memory.device.type != "cpu":
            self._views.pop(param, None)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(self, params: Sequence[Tensor]) -> None:
        """Refuse parameters that have gradients already: these may differ between ranks. Raises
        `ConfigError`.
        """
        for param in params:
            if param.grad is not None:
                raise ConfigError(
                    f"{self.name_of(param)}: has a gradient already, and the ranks may not all "
                    "have the same one; call zero_grad() before prepare"
                )

    def return_to_model(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Leave every parameter, which is an ordinary one again, with its whole gradient, gathered
        from all ranks. make: returns a place for spilled gradients that the user's code holds.
        """
        with self._lock:
            self._local = 0
            if not self._ranks.is_broken and self._is_begun:
                self._give_back_all()
            self._views.clear()
            if self.area is not None:
                self.area.close(make)
            for one in self._sums.values():
                if one.whole is not None:
                    one.whole.release()
            self._slots.clear()
            self._sums.clear()  # autograd graphs that are still alive refer to this object
            self._sum_of.clear()
            self._end_local()

    def _give_back_all(self) -> None:
        self.end_backward()
        for one in self._sums.values():
            if not one.has:
                continue
            mine = self._spilled(one).load() if one.place is None else one.place
            padded = self._sharding.partition_of(one.unit).padded_bytes // mine.element_size()
            whole = torch.empty(padded, dtype=mine.dtype, device="cpu")
            self._ranks.gather(whole, mine, one.name).wait()
            for param in one.has:
                values = part_of(one.members[param], whole.view(torch.uint8))
                param.grad = values.to(param.device, copy=True)


def _check_like(name: str, param: Tensor, grad: Tensor | None) -> None:
    if grad is not None and (grad.shape != param.shape or grad.dtype != param.dtype):
        raise ConfigError(
            f"grad of {name}: expected {tuple(param.shape)} of {param.dtype}, as the parameter is, "
            f"got {tuple(grad.shape)} of {grad.dtype}"
        )
