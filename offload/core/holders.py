"""Reference counts of a tensor's memory: whether other tensors share it."""

from __future__ import annotations

import sys
from functools import cache

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
