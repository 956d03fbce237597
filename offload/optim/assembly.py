"""Fields of parameters whose memory order is not that of their shape (channels_last, say).

Their slices are assembled here and leave in the order of the shape, so that a receiver with another
memory order can take them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.planning.layout import Slice


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


@dataclass
class _Field:
    whole: Tensor  # in the parameter's order of memory
    left: int  # elements not added yet


class Assembly:
    """An assembler of fields from slices that arrive in any order. A field takes its own size of
    memory from its first slice until its last one, and twice that while `sink` is called with the
    whole field. Any thread may call it.
    """

    def __init__(self, sink: Callable[[int, str, int, Tensor], None]) -> None:
        self._sink = sink
        self._fields: dict[tuple[int, str], _Field] = {}
        self._lock = threading.Lock()

    def add(self, record: Record, part: Slice, name: str, values: Tensor) -> None:
        key = record.number, name
        with self._lock:
            field = self._fields.get(key)
            if field is None:
                whole = torch.empty_strided(
                    record.shape, record.stride, dtype=values.dtype, device="cpu"
                )
                field = self._fields[key] = _Field(whole, whole.numel())
        flat(field.whole)[part.begin : part.end].copy_(values)
        with self._lock:
            field.left -= part.end - part.begin
            if field.left:
                return
            del self._fields[key]
        self._sink(record.number, name, 0, field.whole.contiguous().view(-1))

    def drop(self) -> None:
        with self._lock:
            self._fields.clear()
