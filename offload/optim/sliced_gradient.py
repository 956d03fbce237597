"""A gradient of which each rank holds a slice, presented as one tensor.

It has the shape of its parameter and supports what training loops do with gradients between
backward and step: norms, scaling in place, tests for finite values, zeroing. Each works on this
rank's elements. Results that depend on all elements are reduced over ranks, so there every rank
must make the call. Everything else is refused, since no rank has all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.optim.gradient_handle import (
    KEEPER,
    GradientEdit,
    GradientHandle,
    foreach,
    handles_in,
    is_plain,
    itself,
)
from offload.optim.spilled_gradient import SpilledGradientInput

NO_SCALER = (
    "cannot be used with a model that is shared out over ranks: each has a slice of the gradients; "
    "train in bfloat16, which needs none"
)
_PARAM = "_offload_param"


class SliceKeeper(Protocol):
    """The owner of the gradients' slices."""

    def name_of(self, param: Tensor) -> str: ...

    def values_of(self, param: Tensor, gradient: Tensor) -> Tensor:
        """Return this rank's elements of the gradient, flat and to be read only. Raises where the
        gradient is not the parameter's any more, or is not reduced yet.
        """

    def source_of(self, param: Tensor, gradient: Tensor) -> Tensor | SpilledGradientInput:
        """Return the same elements for the update, in memory or spilled."""

    def norm_of(self, param: Tensor, gradient: Tensor, order: float) -> float:
        """Compute the norm over all ranks."""

    def count_of(self, values: Tensor, what: str) -> int:
        """Count the true values over all ranks."""

    def edit(self, param: Tensor, gradient: Tensor, edit: GradientEdit) -> None:
        """Change this rank's elements, now or when they are used."""

    def take(self, param: Tensor, gradient: Tensor, whole: Tensor) -> None:
        """Replace the gradient by these whole values, of which this rank keeps its slice."""


class SlicedGradient(GradientHandle):
    """A handle of a sharded gradient. Only its keeper makes one."""

    @staticmethod
    def of(param: Tensor, keeper: SliceKeeper, device: torch.device) -> SlicedGradient:
        """Make the handle of a parameter's gradient. device: the one that torch sees; the slices
        are in host memory, or on disk.
        """
        made = SlicedGradient.made(param, keeper, device)
        setattr(made, _PARAM, param)
        return made

    @property
    def own(self) -> Tensor:
        """This rank's elements, flat and to be read only."""
        return _keeper(self).values_of(_param(self), self)

    @property
    def source(self) -> Tensor | SpilledGradientInput:
        """This rank's elements for the update."""
        return _keeper(self).source_of(_param(self), self)

    @classmethod
    def _answers(cls) -> Mapping[Any, Callable[..., Any]]:
        return _answers()

    @classmethod
    def _otherwise(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        _refuse(func, args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if "detach" in str(func):
            return args[0]
        _refuse(func, args)

    def __deepcopy__(self, memo: object) -> Any:
        _refuse(Tensor.clone, (self,))

    def __reduce_ex__(self, protocol: object) -> Any:
        _refuse(Tensor.clone, (self,))


class _Verdicts:
    """The elementwise result of a test, such as `isfinite`, which supports reductions over ranks
    only.
    """

    def __init__(self, gradient: SlicedGradient, values: Tensor) -> None:
        self._gradient, self._values = gradient, values

    def any(self) -> Tensor:
        return torch.tensor(self._count() > 0, device="cpu")

    def all(self) -> Tensor:
        return torch.tensor(self._count() == self._gradient.numel(), device="cpu")

    def sum(self) -> Tensor:
        return torch.tensor(self._count(), device="cpu")

    def logical_not(self) -> _Verdicts:
        return _Verdicts(self._gradient, ~self._values)

    __invert__ = logical_not

    def _count(self) -> int:
        keeper = _keeper(self._gradient)
        name = keeper.name_of(_param(self._gradient))
        return keeper.count_of(self._values, f"gradient of {name}")


def _keeper(gradient: SlicedGradient) -> SliceKeeper:
    found: SliceKeeper = getattr(gradient, KEEPER)
    return found


def _param(gradient: SlicedGradient) -> Tensor:
    found: Tensor = getattr(gradient, _PARAM)
    return found


def _refuse(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    found = next(handles_in(args), None)
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if "_amp_" in name:
        raise StateError(f"GradScaler: {NO_SCALER}")
    whose = f"gradient of {_keeper(found).name_of(_param(found))}" if found is not None else "grad"
    raise StateError(
        f"{whose}: cannot be used by {name}, since each rank has a slice of it; norms, "
        "clip_grad_norm_, clip_grad_value_, scaling in place, isfinite(...).all() and zero_() work "
        "on slices, max_grad_norm=... clips in the update"
    )


@cache
def _answers() -> dict[Any, Callable[..., Any]]:
    answers = itself()
    for each in (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm):
        answers[each] = _norm
    answers[torch._foreach_norm] = lambda gs, ord=2, dtype=None: [
        _norm(g, ord, dtype=dtype) for g in gs
    ]
    for name in ("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "zero_"):
        answers[getattr(Tensor, name)] = _in_place(name)
    answers[Tensor.__imul__] = _in_place("mul_")
    answers[Tensor.__itruediv__] = _in_place("div_")
    for name in ("mul", "div", "clamp_min", "clamp_max", "zero"):
        answers[getattr(torch, f"_foreach_{name}_")] = foreach(_in_place(f"{name}_"))
    for each in (torch.isfinite, torch.isnan, torch.isinf):
        answers[each] = answers[getattr(Tensor, each.__name__)] = _verdicts(each)
    answers[Tensor.copy_] = _copy
    for shown in (Tensor.__repr__, Tensor.__str__, Tensor.__format__):
        answers[shown] = _describe
    return answers


def _norm(
    gradient: Any,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    p: Any = None,
    out: Any = None,
) -> Any:
    order = ord if p is None else p
    order = 2.0 if order is None or order == "fro" else float(order)
    is_whole = dim is None and not keepdim and out is None and order > 0
    if not is_whole or not isinstance(gradient, SlicedGradient):
        _refuse(torch.norm, (gradient,))
    value = _keeper(gradient).norm_of(_param(gradient), gradient, order)
    return (
        torch.tensor(value, dtype=torch.float64, device="cpu")
        .to(dtype or gradient.dtype)
        .to(gradient.device)
    )


def _in_place(name: str) -> Callable[..., Any]:
    def act(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(gradient, SlicedGradient) or not is_plain((*args, *kwargs.values())):
            _refuse(getattr(Tensor, name), (gradient, *args))
        _keeper(gradient).edit(_param(gradient), gradient, GradientEdit.of(name, args, kwargs))
        return gradient

    return act


def _verdicts(ask: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda gradient: _Verdicts(gradient, ask(gradient.own))


def _copy(gradient: Any, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(gradient, SlicedGradient) or isinstance(source, SlicedGradient):
        _refuse(Tensor.copy_, (gradient, source))
    _keeper(gradient).take(_param(gradient), gradient, source)
    return gradient


def _describe(gradient: Any, *_: object, **__: object) -> str:
    name = _keeper(gradient).name_of(_param(gradient))
    return f"gradient of {name} {tuple(gradient.shape)} {gradient.dtype}, in slices over the ranks"


def power_sum(values: Tensor, order: float) -> float:
    """Compute this rank's contribution to a norm: what is added over the ranks, or, for the order
    infinity, what the maximum is taken of.
    """
    if not values.numel():
        return 0.0
    if math.isinf(order):
        return float(values.abs().max())
    norm = float(torch.linalg.vector_norm(values, order, dtype=torch.float64))
    return float(norm**order)
