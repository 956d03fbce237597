"""A gradient whose values are elsewhere, seen as one tensor beside its parameter.

It has the shape, type and place of its parameter, and what speaks of it without its values is
answered here. What becomes of everything else is for the subclass to say: `SlicedGradient` refuses
it, since no rank has the values; `SpilledGradient` brings them. Neither knows who holds the bytes:
they ask a keeper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

KEEPER = "_offload_keeper"

# What speaks of a gradient without its values.
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
    """Made by a keeper only."""

    @classmethod
    def made(cls, param: Tensor, keeper: object, device: torch.device) -> Self:
        """device: where torch is to see it. The parameter is not held: it may hold this."""
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
        """What is known without the values, or can be done where they are."""
        raise NotImplementedError

    @classmethod
    def _otherwise(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What has no answer."""
        raise NotImplementedError


@dataclass(frozen=True)
class Edit:
    """A change in place that works on each element by itself, so that it gives the same bits
    whenever it is made, on the whole or part by part. is_blank: what was there does not matter.
    """

    act: Callable[..., object]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_blank: bool = False

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Edit:
        """A method of tensors, with numbers or tensors of one, which are copied: whose they are may
        change them before the edit is made.
        """
        named = {key: _kept(one) for key, one in kwargs.items()}
        return cls(getattr(Tensor, name), tuple(map(_kept, args)), named, name == "zero_")

    def check(self, like: Tensor) -> None:
        """Raise at once what torch will raise for values like these."""
        shape = (0,) if like.dim() else ()
        self(torch.zeros(shape, dtype=like.dtype, device="cpu"))

    def __call__(self, values: Tensor) -> None:
        self.act(values, *self.args, **self.kwargs)


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def handles_in(values: Iterable[Any]) -> Iterator[Any]:
    """All handles among some arguments."""
    for one in values:
        if isinstance(one, GradientHandle):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from handles_in(one)
        elif isinstance(one, Mapping):
            yield from handles_in(one.values())


def itself() -> dict[Any, Callable[..., Any]]:
    """What a handle answers with itself: it has no graph, and no other place."""
    each = (Tensor.detach, Tensor.detach_, Tensor.requires_grad_, Tensor.contiguous)
    answers: dict[Any, Callable[..., Any]] = {one: lambda g, *_, **__: g for one in each}
    answers[Tensor.data.__get__] = lambda g, *_: g  # type: ignore[attr-defined]
    return answers


def foreach(act: Callable[..., Any]) -> Callable[..., Any]:
    """The same for each of a list, with one number for all of them or one for each."""

    def all_of(gradients: Sequence[Any], factor: Any = None) -> None:
        for number, gradient in enumerate(gradients):
            one = factor[number] if isinstance(factor, (tuple, list)) else factor
            act(gradient, *(() if one is None else (one,)))

    return all_of


def is_plain(values: Iterable[Any]) -> bool:
    """Whether all of them are numbers, or tensors that have one."""
    return all(not isinstance(one, Tensor) or one.dim() == 0 for one in values)


@cache
def _harmless() -> frozenset[Any]:
    found = [getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)]
    return frozenset(found + [getattr(Tensor, name) for name in _METHODS])
