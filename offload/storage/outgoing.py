"""The destination of a tensor that is returned to user code: first written, then a tensor."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Outgoing(Protocol):
    """A tensor that is written here and then returned to user code. One thread at a time."""

    @property
    def tensor(self) -> Tensor:
        """The ordinary tensor for the user's code. Later writes show in it, too."""

    def write(self, begin: int, values: Tensor) -> None:
        """Write `values` to the elements from `begin` on, in memory order, rounded to the tensor's
        dtype. values: flat, in host memory. Raises `StoreError`.
        """

    def fill(self, values: Tensor) -> None:
        """Write all elements from `values`, a tensor of the same shape and any strides."""

    def sync(self) -> None:
        """Sync what was written to where it cannot be lost. Blocks. Raises `StoreError`."""


class InMemory:
    """An outgoing tensor in ordinary memory, the host's or a device's; the tensor is dense."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def write(self, begin: int, values: Tensor) -> None:
        there = in_order(self.tensor, self.tensor.stride())[begin : begin + values.numel()]
        there.copy_(values.to(self.tensor.dtype))  # rounded before an upload: the same bits

    def fill(self, values: Tensor) -> None:
        self.tensor.copy_(values)

    def sync(self) -> None:
        """Do nothing: memory needs no sync."""


def in_memory(like: Tensor) -> Outgoing:
    """Make an outgoing tensor in host memory with the shape and dtype of `like`."""
    return InMemory(torch.empty_like(like, device="cpu"))


def in_order(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the elements flat, in the memory order of a dense tensor with these strides; a view
    where `values` has them already.
    """
    values = values.detach()
    if values.stride() != stride:
        there = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
        values = there.copy_(values)
    if values.is_contiguous():
        return values.view(-1)
    return values.as_strided((values.numel(),), (1,))
