"""Fields of state that are somewhere else, in a file, say, and are read slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from offload.optim.assembly import is_row_major, is_same_order
from offload.optim.flat import flat, in_order_of
from offload.optim.recipe import Record
from offload.planning.layout import Slice

_PIECE_NUMEL = 1 << 20


@runtime_checkable
class FieldSource(Protocol):
    """A tensor in the order of its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read_into(self, begin_bytes: int, target: Tensor) -> None:
        """Fill `target`, bytes in host memory, with those from `begin_bytes` on."""


@dataclass(frozen=True)
class FieldPart:
    """A field of the elements that are ours, from `begin` on, in the order of memory; in memory."""

    begin: int
    values: Tensor

    @classmethod
    def empty(cls, begin: int, end: int) -> FieldPart:
        return cls(begin, torch.empty(end - begin, dtype=torch.float32, device="cpu"))

    def write(self, begin: int, values: Tensor) -> None:
        self._from(begin, values.numel()).copy_(values)

    def read_into(self, begin: int, target: Tensor) -> None:
        """Fill it with the elements from `begin` on."""
        target.copy_(self._from(begin, target.numel()))

    def _from(self, begin: int, numel: int) -> Tensor:
        return self.values[begin - self.begin : begin - self.begin + numel]


class Readable(Protocol):
    """A field of the elements that are ours, in the order of memory, wherever it is."""

    def read_into(self, begin: int, target: Tensor) -> None: ...


@dataclass(frozen=True)
class KeptField:
    """The same, and the order of memory that the parameter had when it was kept."""

    part: Readable
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self) -> Tensor:
        """All elements of the parameter, which are ours then."""
        whole = torch.empty_strided(self.shape, self.stride, dtype=torch.float32, device="cpu")
        self.part.read_into(0, flat(whole))
        return whole


def own_range(record: Record) -> tuple[int, int]:
    """The elements whose state is ours."""
    return record.own or (0, record.shape.numel())


class GatheredField:
    """The field that was read last of a parameter whose memory is in another order than its shape:
    it is read whole, and its slices are taken from there. Each field of one parameter at a time.
    """

    def __init__(self) -> None:
        self._number = -1
        self._fields: dict[int, Tensor] = {}

    def of(self, source: FieldSource | KeptField, record: Record) -> Tensor:
        """Flat, in the order of the parameter's memory."""
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
    """Of a contiguous tensor; shares its memory."""
    return tensor.view(-1).view(torch.uint8)


def read_slice(
    source: FieldSource, record: Record, part: Slice, target: Tensor, wholes: GatheredField
) -> None:
    """Elements of a parameter's field, in the order of the parameter's memory."""
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
    """The same of what was kept; the parameter may be in another order of memory since."""
    if is_same_order(record.shape, kept.stride, record.stride):
        kept.part.read_into(part.begin, target)
    else:
        target.copy_(wholes.of(kept, record)[part.begin : part.end])
