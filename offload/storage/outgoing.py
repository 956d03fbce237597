"""Where the values of one tensor go that leaves us: written first, seen as a tensor afterwards."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Outgoing(Protocol):
    """One tensor for somebody else. One thread at a time."""

    @property
    def tensor(self) -> Tensor:
        """What he gets, an ordinary tensor. What is written later is in it, too."""

    def write(self, begin: int, values: Tensor) -> None:
        """Give the elements from `begin` on, in the order of its memory, these values, rounded to
        its type. values: flat, in host memory. Raises `StoreError`.
        """

    def fill(self, values: Tensor) -> None:
        """The same for all of it: a tensor of its shape, in whatever order of memory."""

    def settle(self) -> None:
        """Return when what was written is where it cannot get lost. Raises `StoreError`."""


class InMemory:
    """In ordinary memory, also that of a device; the tensor is dense."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def write(self, begin: int, values: Tensor) -> None:
        there = in_order(self.tensor, self.tensor.stride())[begin : begin + values.numel()]
        there.copy_(values.to(self.tensor.dtype))  # before it goes to a device: the same bits

    def fill(self, values: Tensor) -> None:
        self.tensor.copy_(values)

    def settle(self) -> None:
        """It is."""


def in_memory(like: Tensor) -> Outgoing:
    """For a tensor of that shape and type, in host memory."""
    return InMemory(torch.empty_like(like, device="cpu"))


def in_order(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements as they lie in a dense tensor with these strides; shares memory if they do."""
    values = values.detach()
    if values.stride() != stride:
        there = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
        values = there.copy_(values)
    if values.is_contiguous():
        return values.view(-1)
    return values.as_strided((values.numel(),), (1,))
