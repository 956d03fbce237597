"""Tensors as flat memory, and the order in which their elements lie there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
