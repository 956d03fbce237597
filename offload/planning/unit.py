"""A unit of a model: modules whose parameters are fetched and evicted together, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

ALIGN_BYTES = 256  # the most that cuBLASLt is told; kernels may give other bits with less


@dataclass(frozen=True)
class Member:
    """A parameter in its unit's block. begin: its first byte there. shape, dtype: what it was when
    it got its place; the user's code may set other values by `param.data = ...`.
    """

    name: str
    param: nn.Parameter
    begin: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """The strides of its place in the block."""
        return torch.empty(self.shape, device="meta").stride()


@dataclass(frozen=True)
class Unit:
    """A unit of a model. modules: whenever one of them runs, the unit is needed; none where it
    holds the frozen parameters of another unit. members: what it owns. needs: numbers of the units
    whose parameters its modules have, its own among them if it owns any.
    """

    number: int
    name: str
    modules: tuple[nn.Module, ...]
    members: tuple[Member, ...]
    needs: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the block with all parameters that it owns."""
        last = self.members[-1] if self.members else None
        return 0 if last is None else padded_bytes(last.begin + last.nbytes)


def enclosing(units: Sequence[Unit]) -> set[int]:
    """Return the numbers of the units that are in use while others run: their modules hold those of
    others.
    """
    unit_of = {module: unit.number for unit in units for module in unit.modules}
    around = {
        unit.number
        for unit in units
        for module in unit.modules
        for inner in module.modules()
        if unit_of.get(inner, unit.number) != unit.number
    }
    frozen = {n for number in around for n in units[number].needs if not units[n].modules}
    return around | frozen


def padded_bytes(nbytes: int) -> int:
    """Round up to where the next parameter may begin."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
