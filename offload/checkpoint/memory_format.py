"""The order in which the dimensions of a parameter lie in memory.

Fused steps of torch's own go by memory alone: moments in another order than their parameter's are
added to the wrong elements, silently. So a checkpoint says which parameters are not in the order of
their shape (channels_last, say), for those who have its bytes and no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offload.core.errors import FormatError
from offload.optim.assembly import is_row_major
from offload.optim.flat import is_dense


def order_of(tensor: Tensor) -> list[int] | None:
    """Its dimensions, those with the longest way from one element to the next first. None: in the
    order of its shape, or with holes.
    """
    if is_row_major(tensor.shape, tensor.stride()) or not is_dense(tensor):
        return None
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def parse_memory_formats(values: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """By names of parameters, out of an optimizer's values in a checkpoint; None: it was saved
    before there were any. Raises `FormatError`.
    """
    found = values.get("orders")
    if found is None:
        return None
    if not isinstance(found, dict) or not all(
        isinstance(order, list)
        and all(type(dim) is int for dim in order)
        and sorted(order) == list(range(len(order)))
        for order in found.values()
    ):
        raise FormatError(f"checkpoint: expected orders of dimensions, got {str(found)[:200]}")
    return found


def viewed(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """Flat memory as a tensor of `shape` whose dimensions lie in `order`."""
    there = flat.view([shape[dim] for dim in order])
    return there.permute([order.index(dim) for dim in range(len(order))])
