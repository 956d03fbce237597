"""State of parameters whose memory is in another order than their shape, where ranks share it.

A rank's part is one run of the memory, and is scattered over the tensor that is saved. So each
field is gathered, and one rank, another for each parameter, writes all of it; one field at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from offload.checkpoint.rank_group import RankGroup
from offload.optim.assembly import is_row_major
from offload.optim.export import ParamOptimizerState
from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.optim.source import as_bytes
from offload.planning.layout import ELEMENT_BYTES


def is_strided(record: Record) -> bool:
    return record.own is not None and not is_row_major(record.shape, record.stride)


class StridedState:
    """The parts of all such fields that this rank holds, until they are written."""

    def __init__(self, held: Iterable[ParamOptimizerState]) -> None:
        self._fields = {
            (each.record.number, field): each.record
            for each in held
            if is_strided(each.record)
            for field in each.fields
        }
        self._parts = {
            key: torch.empty(0, dtype=torch.float32, device="cpu") for key in self._fields
        }
        self._lock = threading.Lock()

    def takes(self, number: int, field: str) -> bool:
        return (number, field) in self._fields

    def add(self, number: int, field: str, begin_bytes: int, values: Tensor) -> None:
        """Copy some of this rank's elements, by their places in the parameter's memory. Any thread
        may call it.
        """
        record = self._fields[number, field]
        first, end = record.own or (0, 0)
        with self._lock:
            if not self._parts[number, field].numel():
                self._parts[number, field] = torch.empty(
                    end - first, dtype=torch.float32, device="cpu"
                )
            part = self._parts[number, field]
        begin = begin_bytes // ELEMENT_BYTES - first
        part[begin : begin + values.numel()].copy_(values)

    def write(self, rank_group: RankGroup, put: Callable[[int, str, Tensor], None]) -> None:
        """Gather each field. put: called with those that this rank writes. Every rank must call
        this; it blocks until all have.
        """
        for (number, field), record in self._fields.items():
            parts = rank_group.bring_together(as_bytes(self._parts.pop((number, field))))
            if number % rank_group.count == rank_group.rank:
                whole = torch.empty_strided(
                    record.shape, record.stride, dtype=torch.float32, device="cpu"
                )
                as_bytes(flat(whole)).copy_(torch.cat(parts))
                put(number, field, whole.contiguous().view(-1))
