"""Tensors as torch sees them: which tensors share memory, the order in which elements lie there,
tensors that are made outside of the caller's inference mode, and tensors that stand for values
which are elsewhere.

A tensor made under `torch.inference_mode()` can never be trained, and neither can a parameter whose
values are in one. Tensors that the engine makes while the user evaluates outlive the evaluation, so
the engine leaves that mode while it works. The user's code keeps its mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor


def holders(memory: Tensor) -> int:
    """Return how many tensors share the storage of `memory`, `memory` itself included."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without `storage` itself


def has_grad_to_itself(param: Tensor) -> bool:
    """Return whether the parameter has the only reference to its gradient and to the gradient's
    storage. The parameter must have a gradient, and the caller must not hold a reference to it.
    """
    grad = param.grad
    assert grad is not None
    # torch does not count references to memory from numpy and the like, nor in other processes.
    is_shared: bool = grad.is_shared()  # type: ignore[no-untyped-call]
    is_torchs = grad.untyped_storage().resizable() and not is_shared
    del grad
    return is_torchs and _counts(param) == _counts_of_one()


def _counts(param: Tensor) -> tuple[int, int, int, int]:
    """Count the references to the gradient and to its storage, from Python and from C++; those of
    this function are among them.
    """
    grad = param.grad
    assert grad is not None
    storage = grad.untyped_storage()
    return (
        sys.getrefcount(grad),
        grad._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(storage),
        holders(grad),
    )


@cache
def _counts_of_one() -> tuple[int, int, int, int]:
    """Return the counts of a gradient without other references. They differ between versions of
    Python and torch, so they are measured.
    """
    with torch.inference_mode(False):
        lone = torch.empty(1, dtype=torch.float32, device="cpu")
        lone.grad = torch.empty_like(lone)
    return _counts(lone)


def flat(tensor: Tensor) -> Tensor:
    """View a dense tensor as one dimension, in the order of memory; shares its memory."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie next to one another, in any order (channels_last, say)."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def in_order_of(tensor: Tensor, param: Tensor) -> Tensor:
    """Return the elements of `tensor`, flat, in the order in which those of `param` lie in memory.
    Shares the memory of `tensor` if its strides are the same, otherwise copies.
    """
    if tensor.stride() != param.stride():
        there = torch.empty_strided(
            param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = there.copy_(tensor)
    return flat(tensor)


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements lie one behind the other in the order of the shape."""
    step = 1
    for size, distance in zip(reversed(shape), reversed(stride), strict=True):
        if size == 0:
            return True
        if size != 1:
            if distance != step:
                return False
            step *= size
    return True


def is_same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether both strides put elements in the same order; sizes of 1 have any stride."""
    return all(size < 2 or a == b for size, a, b in zip(shape, one, other, strict=True))


P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to leave its caller's inference mode, if there is one; autograd is off
    then.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # the first alone would enable autograd
            return function(*args, **kwargs)

    return call


@contextmanager
def entered_outside(manager: AbstractContextManager[None]) -> Iterator[None]:
    """Enter and leave `manager` outside of inference mode; the block keeps the caller's mode."""
    outside_inference_mode(manager.__enter__)()
    leave = outside_inference_mode(manager.__exit__)
    try:
        yield
    except BaseException:
        if not leave(*sys.exc_info()):
            raise
    else:
        leave(None, None, None)


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
