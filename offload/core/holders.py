"""Who else holds a piece of memory."""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor


def holders(memory: Tensor) -> int:
    """How many tensors share the memory, `memory` itself included."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without `storage` itself


def has_grad_to_itself(param: Tensor) -> bool:
    """Whether nobody but the parameter can reach its gradient, which is there, or the memory of
    it. The caller must not hold it either.
    """
    grad = param.grad
    assert grad is not None
    # What numpy and the like have made, and what other processes see, torch does not count.
    is_shared: bool = grad.is_shared()  # type: ignore[no-untyped-call]
    is_torchs = grad.untyped_storage().resizable() and not is_shared
    del grad
    return is_torchs and _counts(param) == _counts_of_one()


def _counts(param: Tensor) -> tuple[int, int, int, int]:
    """References to the gradient and to its memory, by Python and by C++; those of this function
    are among them.
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
    """What they are where nobody else has any: versions of Python and torch differ in that."""
    with torch.inference_mode(False):
        lone = torch.empty(1, dtype=torch.float32, device="cpu")
        lone.grad = torch.empty_like(lone)
    return _counts(lone)
