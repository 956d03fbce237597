"""A tensor subclass that stands for a gradient whose values are not in its memory.

It has the shape, dtype and device of its parameter, and answers here all calls that need no values.
The subclass decides about every other call: `SlicedGradient` refuses it, since no rank has all of
the values; `SpilledGradient` fetches them. Neither knows which object holds the bytes: they ask a
keeper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

KEEPER = "_offload_keeper"

# Attributes and methods that do not need a gradient's values.
_ATTRIBUTES = (
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "shape",
    "_version",
)
_METHODS = (
    "__hash__",
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_signed",
    "nelement",
    "numel",
    "size",
    "stride",
)


class GradientHandle(Tensor):
    """A handle of a gradient whose values a keeper holds. Only a keeper makes one."""

    @classmethod
    def made(cls, param: Tensor, keeper: object, device: torch.device) -> Self:
        """Make the handle of a parameter's gradient. device: the device that torch sees. Holds no
        reference to the parameter, which may hold this handle as its `.grad`.
        """
        made: Self = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=device
        )
        setattr(made, KEEPER, keeper)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        answer = cls._answers().get(func)
        if answer is None:
            return cls._otherwise(func, args, kwargs or {})
        with torch.no_grad():
            return answer(*args, **(kwargs or {}))

    @classmethod
    def _answers(cls) -> Mapping[Any, Callable[..., Any]]:
        """Return the functions that are answered without the values, or applied where they are."""
        raise NotImplementedError

    @classmethod
    def _otherwise(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Handle a function that has no answer: refuse it, or fetch the values."""
        raise NotImplementedError


@dataclass(frozen=True)
class GradientEdit:
    """An in-place change that works on each element by itself, so that it gives the same bits now
    or later, on the whole or part by part. is_blank: the values before it do not matter.
    """

    act: Callable[..., object]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_blank: bool = False

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GradientEdit:
        """Make the edit that calls a method of `Tensor` with numbers or one-element tensors. The
        tensors are copied: user code may change them before the edit is applied.
        """
        named = {key: _kept(one) for key, one in kwargs.items()}
        return cls(getattr(Tensor, name), tuple(map(_kept, args)), named, name == "zero_")

    def check(self, like: Tensor) -> None:
        """Raise now what torch would raise later, for values of the dtype of `like`."""
        shape = (0,) if like.dim() else ()
        self(torch.zeros(shape, dtype=like.dtype, device="cpu"))

    def __call__(self, values: Tensor) -> None:
        self.act(values, *self.args, **self.kwargs)


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def handles_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield all handles among some arguments, also in nested lists, tuples and mappings."""
    for one in values:
        if isinstance(one, GradientHandle):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from handles_in(one)
        elif isinstance(one, Mapping):
            yield from handles_in(one.values())


def itself() -> dict[Any, Callable[..., Any]]:
    """Return the functions that a handle answers with itself: it has no graph, and no other
    place.
    """
    each = (Tensor.detach, Tensor.detach_, Tensor.requires_grad_, Tensor.contiguous)
    answers: dict[Any, Callable[..., Any]] = {one: lambda g, *_, **__: g for one in each}
    answers[Tensor.data.__get__] = lambda g, *_: g  # type: ignore[attr-defined]
    return answers


def foreach(act: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `foreach` variant of `act`: it takes a list, with one number for all or one each."""

    def all_of(gradients: Sequence[Any], factor: Any = None) -> None:
        for number, gradient in enumerate(gradients):
            one = factor[number] if isinstance(factor, (tuple, list)) else factor
            act(gradient, *(() if one is None else (one,)))

    return all_of


def is_plain(values: Iterable[Any]) -> bool:
    """Return whether every value is a number or a tensor without dimensions."""
    return all(not isinstance(one, Tensor) or one.dim() == 0 for one in values)


@cache
def _harmless() -> frozenset[Any]:
    found = [getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)]
    return frozenset(found + [getattr(Tensor, name) for name in _METHODS])
