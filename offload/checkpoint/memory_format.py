"""The memory format of a parameter: the order in which its dimensions lie in memory.

torch's fused steps go by memory alone: moments in another order than their parameter's are silently
added to the wrong elements. So a checkpoint records which parameters are not in the order of their
shape (channels_last, say), for readers that have its bytes and no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offload.core.errors import FormatError
from offload.optim.assembly import is_row_major
from offload.optim.flat import is_dense


def order_of(tensor: Tensor) -> list[int] | None:
    """Return the tensor's dimensions, the one with the largest stride first. None: they are in the
    order of its shape, or its memory has holes.
    """
    if is_row_major(tensor.shape, tensor.stride()) or not is_dense(tensor):
        return None
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def parse_memory_formats(values: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """Return the orders of dimensions, by parameter name, from an optimizer's values in a
    checkpoint; None: it is of a version that did not record them. Raises `FormatError`.
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
    """View flat memory as a tensor of `shape` whose dimensions lie in `order`."""
    there = flat.view([shape[dim] for dim in order])
    return there.permute([order.index(dim) for dim in range(len(order))])
