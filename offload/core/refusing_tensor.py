"""Tensors that stand for values which are elsewhere: the calls on them, and what those need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Attributes and methods that need no values, wherever these are.
_ATTRIBUTES = (
    "_version",
    "dtype",
    "grad",
    "grad_fn",
    "is_leaf",
    "is_mkldnn",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "shape",
)
_METHODS = (
    "__hash__",
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_floating_point",
    "is_signed",
    "nelement",
    "numel",
    "size",
)


class RefusingTensor(Tensor):
    """A tensor without values of its own. It answers calls that need none; its class decides about
    every other call.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in cls._harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls._decide(func, args, kwargs or {})

    @classmethod
    def _harmless(cls) -> frozenset[Any]:
        """Return the functions that need no values."""
        raise NotImplementedError

    @classmethod
    def _decide(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Answer any other function, get the values for it, or refuse it."""
        raise NotImplementedError


def harmless(attributes: Iterable[str], methods: Iterable[str]) -> frozenset[Any]:
    """Return the functions behind these attributes and methods of a tensor, and behind those that
    never need values. Leaves out what this version of torch does not have.
    """
    found = [getattr(Tensor, name, None) for name in (*_ATTRIBUTES, *attributes)]
    getters = [accessor.__get__ for accessor in found if accessor is not None]
    return frozenset(getters + [getattr(Tensor, name) for name in (*_METHODS, *methods)])


def name_of_function(func: Callable[..., Any]) -> str:
    """Return the name by which the user knows a function: for an accessor the attribute's."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def found_in(kind: type[T], value: object) -> Iterator[T]:
    """Yield all tensors of a class among some arguments, also in nested lists, tuples and
    mappings.
    """
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from found_in(kind, one)
    elif isinstance(value, Mapping):
        yield from found_in(kind, list(value.values()))
