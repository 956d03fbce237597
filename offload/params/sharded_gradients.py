"""The gradients of a model that is sharded over ranks, as the user's code sees them in `.grad`.

Each rank has a shard of each unit's gradients (`mean_gradients.py`). The user's code sees a
gradient as a handle of its parameter's shape, which supports what training loops do with gradients
between backward and step: norms, scaling in place, tests for finite values, zeroing. Each works on
this rank's elements. Results that depend on all elements are reduced over ranks, so there every
rank must make the call. Everything else is refused, since no rank has all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError, StateError
from offload.core.tensors import found_in, name_of_function
from offload.optim.gradient_handle import Answers, GradientHandle, answers_for
from offload.optim.gradient_source import Gradient, GradientEdit
from offload.params.gradients import check_like
from offload.params.mean_gradients import MeanGradients
from offload.params.placeholder import own_grad, set_own_grad
from offload.params.unit_sum import UnitSum, part_of
from offload.storage.handout import Outgoing

NO_SCALER = (
    "cannot be used with a model that is shared out over ranks: each has a slice of the gradients; "
    "train in bfloat16, which needs none"
)
_EDITS = ("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "zero_")


class ShardedGradients(MeanGradients):
    """The sharded gradients of one model, with the handles that `.grad` returns."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._handles: dict[Tensor, GradientHandle] = {}
        self._norms: dict[Tensor, float] = {}
        self._exposed: set[Tensor] = set()  # exposed parameters, whose gradients show, too

    def begin(self) -> None:
        """Note that a backward pass begins, and hide the gradients of exposed parameters, so that
        autograd finds none to add to.
        """
        super().begin()
        for param in self._exposed:
            set_own_grad(param, None)

    def ended(self) -> None:
        self._norms.clear()
        self._show_exposed()

    # --- the user's view --------------------------------------------------------------------------

    def of(self, param: Tensor) -> Tensor | None:
        """Return the handle of a parameter's gradient; None: it has none."""
        with self.lock:
            self.end_what_broke()
            if own_grad(param) is not None and param not in self._exposed:
                raise StateError(
                    f"{self.name_of(param)}: has a gradient, but was frozen when the model was "
                    "prepared: close() and prepare again"
                )
            one = self.sum_of.get(param)
            if one is None or not (param in one.has or param in one.arrived):
                return None
            if param not in self._handles:
                # torch wants the gradient of an exposed parameter on the parameter's device.
                device = param.device if param in self._exposed else "cpu"
                self._handles[param] = GradientHandle.of(
                    param, ShardOfGradient(self, param), device
                )
            return self._handles[param]

    def put(self, param: Tensor, grad: Tensor | None) -> None:
        """Replace a parameter's gradient by `grad`, or drop it (None). Every rank must pass the
        same.
        """
        with self.lock:
            self.end_what_broke()
            one = self.sum_of.get(param)
            if grad is not None and grad is self._handles.get(param):
                return
            if one is None:
                if grad is not None:
                    raise StateError(f"{self.name_of(param)}: was frozen when it was prepared")
                set_own_grad(param, None)
                return
            check_like(f"grad of {self.name_of(param)}", param, grad)
            self._handles.pop(param, None)  # a use of the old handle raises from now on
            one.drop(param)
            if grad is not None:
                one.clear_what_is_gone()
                if one.is_empty:
                    one.take_in(torch.zeros_like(one.like, device="cpu"), is_first=True)
                    one.is_empty = False
                one.has.add(param)
                one.fill(param, grad.detach())
            self._norms.clear()

    def is_of(self, param: Tensor, source: object) -> bool:
        """Return whether the source is that of the parameter's present gradient."""
        handle = self._handles.get(param)
        return handle is not None and handle.source is source

    def norm_of(self, param: Tensor) -> float:
        """Return a gradient's norm over all ranks."""
        if not self._norms:  # all in one reduction: clipping asks for every norm
            there = [p for one in self.sums.values() for p in one.members if p in one.has]
            sums = []
            for each in there:
                values = self.sum_of[each].own(each)
                sums.append(kernels.grad_stats(values).sum_squares if values.numel() else 0.0)
            totals = self.ranks.sum(sums, "norms of gradients")
            self._norms = dict(zip(there, map(math.sqrt, totals), strict=True))
        return self._norms[param]

    def forget_norms(self) -> None:
        """Forget all norms, since a gradient has changed."""
        self._norms.clear()

    @contextmanager
    def exposed(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Show the gradients of these parameters in `.grad` of the exposed parameters while the
        block runs; then take in what the user's code has put there.
        """
        known = self.sum_of
        fresh = [param for param in params if param in known and param not in self._exposed]
        for param in fresh:
            self._exposed.add(param)
            self._move_handle(param)
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
        if grad is not self._handles.get(param):
            self.put(param, grad)
        self._move_handle(param)

    def _move_handle(self, param: Tensor) -> None:
        """Drop the handle if the device may change: the gradient of an exposed parameter shows on
        the device, otherwise in host memory.
        """
        if self.sharding.on_device:
            self._handles.pop(param, None)

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
        with self.lock:
            self.close(_give_back)
            self._handles.clear()
            if self.area is not None:
                self.area.close(make)


def _give_back(one: UnitSum, whole: Tensor) -> None:
    for param in one.has:
        param.grad = part_of(one.members[param], whole).to(param.device, copy=True)


class ShardOfGradient:
    """The source of one gradient of which each rank has a shard. It has no reference to the shard:
    user code may hold it for longer than the engine holds the memory.
    """

    def __init__(self, owner: ShardedGradients, param: Tensor) -> None:
        self._owner, self._param = owner, param
        self.name, self.ranks = owner.name_of(param), owner.ranks

    @property
    def answers(self) -> Answers:
        return _answers()

    @property
    def own(self) -> Tensor:
        """This rank's elements, flat and to be read only."""
        with self._owner.lock:
            return self._checked().own(self._param)

    @property
    def input(self) -> Gradient:
        with self._owner.lock:
            return self._checked().input(self._param)

    def _checked(self) -> UnitSum:
        """Return the unit's sum that holds the gradient. Raises `StateError` if this is no longer
        the parameter's gradient, or if it is not reduced yet.
        """
        if not self._owner.is_of(self._param, self):
            raise StateError(f"{self.name}: this gradient has been dropped; ask for .grad again")
        one = self._owner.sum_of[self._param]
        if self._param in one.arrived:
            raise StateError(
                f"{self.name}: its gradient of no_sync() is not reduced yet; run the last backward "
                "pass outside of it"
            )
        return one

    def load(self, func: Callable[..., Any]) -> NoReturn:
        _refuse(f"gradient of {self.name}", func)

    def store(self, values: Tensor) -> None:
        """Replace the gradient by these whole values, of which this rank keeps its shard."""
        self._checked().fill(self._param, values.detach().expand(self._param.shape))
        self._owner.forget_norms()

    def edit(self, edit: GradientEdit) -> None:
        self._checked().edit(self._param, edit)
        self._owner.forget_norms()

    def add(self, values: Tensor) -> NoReturn:
        self.load(Tensor.add_)

    def norm(self, order: float = 2.0) -> Tensor:
        """Compute the norm over all ranks."""
        self._checked()
        value = self._owner.norm_of(self._param) if order == 2.0 else self._other_norm(order)
        return torch.tensor(value, dtype=torch.float64, device="cpu")

    def _other_norm(self, order: float) -> float:
        mine, what = _power_sum(self.own, order), f"norm of {self.name}"
        if math.isinf(order):
            each = self.ranks.exchange(mine.hex(), what)
            values = [float.fromhex(text) for text in each]
            return math.nan if any(map(math.isnan, values)) else max(values)
        return float(self.ranks.sum([mine], what)[0] ** (1 / order))


class _Verdicts:
    """The elementwise result of a test, such as `isfinite`, which supports reductions over ranks
    only.
    """

    def __init__(self, source: ShardOfGradient, numel: int, values: Tensor) -> None:
        self._source, self._numel, self._values = source, numel, values

    def any(self) -> Tensor:
        return torch.tensor(self._count() > 0, device="cpu")

    def all(self) -> Tensor:
        return torch.tensor(self._count() == self._numel, device="cpu")

    def sum(self) -> Tensor:
        return torch.tensor(self._count(), device="cpu")

    def logical_not(self) -> _Verdicts:
        return _Verdicts(self._source, self._numel, ~self._values)

    __invert__ = logical_not

    def _count(self) -> int:
        mine = float(self._values.sum())
        return int(self._source.ranks.sum([mine], f"gradient of {self._source.name}")[0])


@cache
def _answers() -> Answers:
    answers = answers_for(_EDITS)
    for each in (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm):
        answers[each] = _norm
    answers[torch._foreach_norm] = lambda gs, ord=2, dtype=None: [
        _norm(g, ord, dtype=dtype) for g in gs
    ]
    for each in (torch.isfinite, torch.isnan, torch.isinf):
        answers[each] = answers[getattr(Tensor, each.__name__)] = _verdicts(each)
    answers[Tensor.copy_] = _copy
    for shown in (Tensor.__repr__, Tensor.__str__, Tensor.__format__):
        answers[shown] = _describe
    return answers


def _refuse(whose: str, func: Callable[..., Any]) -> NoReturn:
    name = name_of_function(func)
    if "_amp_" in name:
        raise StateError(f"GradScaler: {NO_SCALER}")
    raise StateError(
        f"{whose}: cannot be used by {name}, since each rank has a slice of it; norms, "
        "clip_grad_norm_, clip_grad_value_, scaling in place, isfinite(...).all() and zero_() work "
        "on slices, max_grad_norm=... clips in the update"
    )


def _source(gradient: Any, func: Callable[..., Any]) -> ShardOfGradient:
    """Return the source of a handle; refuse `func` for any other tensor beside sharded ones."""
    source = gradient.source if isinstance(gradient, GradientHandle) else None
    if not isinstance(source, ShardOfGradient):
        _refuse("grad", func)
    return source


def _norm(
    gradient: Any,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    p: Any = None,
    out: Any = None,
) -> Tensor:
    source, order = _source(gradient, torch.norm), ord if p is None else p
    order = 2.0 if order is None or order == "fro" else float(order)
    if dim is not None or keepdim or out is not None or order <= 0:
        source.load(torch.norm)
    return source.norm(order).to(dtype or gradient.dtype).to(gradient.device)


def _verdicts(ask: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def act(gradient: Any) -> _Verdicts:
        source = _source(gradient, ask)
        return _Verdicts(source, gradient.numel(), ask(source.own))

    return act


def _copy(gradient: Any, source: Tensor, non_blocking: bool = False) -> Any:
    handles = list(found_in(GradientHandle, (gradient, source)))
    own = _source(handles[0], Tensor.copy_)
    if handles[0] is not gradient or len(handles) > 1:
        own.load(Tensor.copy_)
    own.store(source)
    return gradient


def _describe(gradient: Any, *_: object, **__: object) -> str:
    name = _source(gradient, Tensor.__repr__).name
    return f"gradient of {name} {tuple(gradient.shape)} {gradient.dtype}, in slices over the ranks"


def _power_sum(values: Tensor, order: float) -> float:
    """Compute this rank's contribution to a norm: what is added over the ranks, or, for the order
    infinity, what the maximum is taken of.
    """
    if not values.numel():
        return 0.0
    if math.isinf(order):
        return float(values.abs().max())
    norm = float(torch.linalg.vector_norm(values, order, dtype=torch.float64))
    return float(norm**order)
