"""A unit of a model: modules whose parameters are fetched and evicted together, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from offload.planning.layout import round_up

ALIGN_BYTES = 256  # the most that cuBLASLt is told; kernels may give other bits with less
PAGE = 4096
_DEVICE_ALIGN = 512
DEVICE_SPARE_BYTES = 8 * _DEVICE_ALIGN  # a placeholder's value for each type of parameters


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

    @cached_property
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

    @cached_property
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


@dataclass(frozen=True)
class UnitSizes:
    """The sizes of a model's units. nbytes: of each in host memory. needs: the units that each
    needs. kept: those that hold others, and stay resident. in_files: those that are read from
    weight files, and never written.
    """

    nbytes: tuple[int, ...] = ()
    needs: tuple[tuple[int, ...], ...] = ()
    kept: frozenset[int] = frozenset()
    in_files: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        nbytes_of: Callable[[Unit], int] = lambda unit: unit.nbytes,
        in_files: Collection[int] = (),
    ) -> UnitSizes:
        needs = tuple(unit.needs for unit in units)
        kept = frozenset(enclosing(units))
        return cls(tuple(map(nbytes_of, units)), needs, kept, frozenset(in_files))

    @property
    def pages(self) -> list[int]:
        return [round_up(nbytes, PAGE) for nbytes in self.nbytes]

    @property
    def stored_bytes(self) -> int:
        """The bytes of the blocks that may have to be written to the store."""
        return sum(size for number, size in enumerate(self.pages) if number not in self.in_files)

    @property
    def least_bytes(self) -> int:
        """The bytes for blocks when one unit at a time is in memory, beside the units that hold
        others.
        """
        return self.least_of(self.pages)

    @property
    def least_device_bytes(self) -> int:
        """The same on a device."""
        return self.least_of([on_device_bytes(nbytes) for nbytes in self.nbytes])

    def least_of(self, sizes: Sequence[int]) -> int:
        """The same where the units have other sizes."""
        at_once = (sum(sizes[n] for n in needs if n not in self.kept) for needs in self.needs)
        return sum(sizes[number] for number in self.kept) + max(at_once, default=0)


NO_UNITS = UnitSizes()


def padded_bytes(nbytes: int) -> int:
    """Round up to where the next parameter may begin."""
    return round_up(nbytes, ALIGN_BYTES)


def on_device_bytes(nbytes: int) -> int:
    """Return the bytes that a block of `nbytes` takes on a device: allocators round up."""
    return round_up(nbytes, _DEVICE_ALIGN)
