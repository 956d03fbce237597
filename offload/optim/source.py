"""Sources of state fields, such as tensors in a file, that are read slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from offload.optim.flat import flat, in_order_of, is_row_major, is_same_order
from offload.optim.recipe import Record
from offload.planning.layout import Slice

_PIECE_NUMEL = 1 << 20


@runtime_checkable
class FieldSource(Protocol):
    """A tensor that is read in parts, with its elements in the order of its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read_into(self, begin_bytes: int, target: Tensor) -> None:
        """Fill `target`, bytes in host memory, with the source's bytes from `begin_bytes` on."""


@dataclass(frozen=True)
class FieldPart:
    """A field of this rank's elements in host memory, from element `begin` on, in the parameter's
    order of memory.
    """

    begin: int
    values: Tensor

    @classmethod
    def empty(cls, begin: int, end: int) -> FieldPart:
        return cls(begin, torch.empty(end - begin, dtype=torch.float32, device="cpu"))

    def write(self, begin: int, values: Tensor) -> None:
        self._from(begin, values.numel()).copy_(values)

    def read_into(self, begin: int, target: Tensor) -> None:
        """Fill `target` with the elements from `begin` on."""
        target.copy_(self._from(begin, target.numel()))

    def _from(self, begin: int, numel: int) -> Tensor:
        return self.values[begin - self.begin : begin - self.begin + numel]


class Readable(Protocol):
    """A field of this rank's elements, in the parameter's order of memory, in host memory or on
    disk.
    """

    def read_into(self, begin: int, target: Tensor) -> None: ...


@dataclass(frozen=True)
class KeptField:
    """A field that was kept aside, with the order of memory that its parameter had then."""

    part: Readable
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self) -> Tensor:
        """Read all elements of the parameter. All of them must be this rank's."""
        whole = torch.empty_strided(self.shape, self.stride, dtype=torch.float32, device="cpu")
        self.part.read_into(0, flat(whole))
        return whole


def own_range(record: Record) -> tuple[int, int]:
    """Return the elements whose state belongs to this rank."""
    return record.own or (0, record.shape.numel())


class GatheredField:
    """A cache of one parameter's whole fields, for parameters whose order of memory is not that of
    their shape: such a field is read whole once, and its slices are taken from there. It holds the
    fields of one parameter at a time.
    """

    def __init__(self) -> None:
        self._number = -1
        self._fields: dict[int, Tensor] = {}

    def of(self, source: FieldSource | KeptField, record: Record) -> Tensor:
        """Return the whole field, flat, in the parameter's order of memory."""
        if record.number != self._number:
            self._number, self._fields = record.number, {}
        if id(source) not in self._fields:
            self._fields[id(source)] = in_order_of(_whole(source), record.local)
        return self._fields[id(source)]


def _whole(source: FieldSource | KeptField) -> Tensor:
    if isinstance(source, KeptField):
        return source.whole()
    whole = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    source.read_into(0, as_bytes(whole))
    return whole


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes; shares its memory."""
    return tensor.view(-1).view(torch.uint8)


def read_slice(
    source: FieldSource, record: Record, part: Slice, target: Tensor, wholes: GatheredField
) -> None:
    """Read a slice of a parameter's field into `target`, in the parameter's order of memory."""
    if not is_row_major(record.shape, record.stride):
        target.copy_(wholes.of(source, record)[part.begin : part.end])
    elif source.dtype == target.dtype:
        source.read_into(part.begin * target.element_size(), as_bytes(target))
    else:
        for begin in range(0, target.numel(), _PIECE_NUMEL):
            some = target[begin : begin + _PIECE_NUMEL]
            read = torch.empty(some.numel(), dtype=source.dtype, device="cpu")
            source.read_into((part.begin + begin) * read.element_size(), as_bytes(read))
            some.copy_(read)


def read_kept(
    kept: KeptField, record: Record, part: Slice, target: Tensor, wholes: GatheredField
) -> None:
    """Read a slice of a field that was kept aside; the parameter may have another order of memory
    now.
    """
    if is_same_order(record.shape, kept.stride, record.stride):
        kept.part.read_into(part.begin, target)
    else:
        target.copy_(wholes.of(kept, record)[part.begin : part.end])
