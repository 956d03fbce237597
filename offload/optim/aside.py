"""Optimizer state kept between two plans: this rank's part of it, in host memory or in a store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import CapacityError, StoreError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.export import OptimizerStateHolder, ParamOptimizerState, Targets
from offload.optim.source import FieldPart, KeptField, own_range
from offload.planning.layout import ELEMENT_BYTES, Chunk
from offload.storage.disk import DiskStore
from offload.storage.files import BLOCK_BYTES
from offload.storage.handout import Refusal, allow_memory

_PIECE_NUMEL = 1 << 20  # elements that are stored and read at once


class StoredPart:
    """A field of the elements that this rank owns, in a store that checks every byte. It is held in
    the pieces in which it was written.
    """

    def __init__(self, store: DiskStore, name: str) -> None:
        self._store, self._name = store, name
        self._begins: list[int] = []  # first elements of the pieces, sorted
        self._ends: dict[int, int] = {}

    def write(self, begin: int, values: Tensor) -> None:
        """Write values and wait until they are stored: the caller then reuses their memory."""
        tickets: list[Ticket[None]] = []
        for first, end in _pieces(begin, begin + values.numel()):
            some = values[first - begin : end - begin]
            tickets.append(self._store.write(self._key(first), some))
            self._begins.insert(bisect_right(self._begins, first), first)
            self._ends[first] = end
        for ticket in tickets:
            ticket.wait()

    def read_into(self, begin: int, target: Tensor) -> None:
        """Fill `target` with the elements from `begin` on. Blocks."""
        end = begin + target.numel()
        index = max(0, bisect_right(self._begins, begin) - 1)
        for first in self._begins[index:]:
            low, high = max(first, begin), min(self._ends[first], end)
            if first >= end:
                break
            if low >= high:
                continue
            piece = torch.empty(self._ends[first] - first, dtype=target.dtype, device="cpu")
            self._store.read(self._key(first), piece).wait()
            target[low - begin : high - begin].copy_(piece[low - first : high - first])

    def _key(self, begin: int) -> str:
        return f"{self._name} from {begin}"


class KeptOptimizerState:
    """The optimizer state that is kept while a new plan is made: by parameter, with the records of
    the plan it was copied out of. store: None if the state is in host memory.
    """

    def __init__(
        self,
        held: Sequence[ParamOptimizerState],
        parts: Mapping[int, Mapping[str, FieldPart | StoredPart]],
        store: DiskStore | None,
    ) -> None:
        self._held, self._parts, self._store = held, parts, store

    @classmethod
    def in_memory(cls, origin: OptimizerStateHolder) -> KeptOptimizerState:
        held = origin.held()
        parts = {
            h.record.number: {field: FieldPart.empty(*own_range(h.record)) for field in h.fields}
            for h in held
        }
        origin.copy_out(parts)
        return cls(held, parts, None)

    @classmethod
    def on_disk(
        cls,
        origin: OptimizerStateHolder,
        chunks: Sequence[Chunk],
        directories: Sequence[Path],
        metrics: Metrics,
    ) -> KeptOptimizerState:
        """Copy the state out to a store in `directories`. chunks: those that hold the state now.
        Where the directories have no room, the state goes to host memory if enough of that is free;
        otherwise this raises a `StoreError`, and nothing has changed.
        """
        held = origin.held()
        nbytes = _stored_bytes(held, chunks)
        if not nbytes:
            return cls.in_memory(origin)
        try:
            store = DiskStore(directories, nbytes, metrics=metrics)
        except (CapacityError, StoreError) as error:
            code = getattr(error, "errno", None)
            allow_memory(nbytes, [Refusal(str(error), code, str(directories[0]))], metrics)
            return cls.in_memory(origin)
        try:
            parts = {
                h.record.number: {
                    field: StoredPart(store, f"{field} of {h.record.number} {h.record.name}")
                    for field in h.fields
                }
                for h in held
            }
            origin.copy_out(parts)
        except BaseException:
            store.close()
            raise
        return cls(held, parts, store)

    @property
    def is_on_disk(self) -> bool:
        return self._store is not None

    def held(self) -> Sequence[ParamOptimizerState]:
        return self._held

    @property
    def states(self) -> dict[Tensor, dict[str, Any]]:
        """The state by parameter; its fields are read when they are needed."""
        found: dict[Tensor, dict[str, Any]] = {}
        for held in self._held:
            record, parts = held.record, self._parts[held.record.number]
            kept = {
                field: KeptField(part, record.shape, record.stride) for field, part in parts.items()
            }
            found[record.param] = {**held.scalars, **kept}
        return found

    def copy_out(self, targets: Targets) -> None:
        for held in self._held:
            record = held.record
            for field, target in targets.get(record.number, {}).items():
                for begin, end in _pieces(*own_range(record)):
                    values = torch.empty(end - begin, dtype=torch.float32, device="cpu")
                    self._parts[record.number][field].read_into(begin, values)
                    target.write(begin, values)

    def close(self) -> None:
        """Release the store, if there is one. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, _PIECE_NUMEL):
        yield first, min(first + _PIECE_NUMEL, end)


def _stored_bytes(held: Sequence[ParamOptimizerState], chunks: Sequence[Chunk]) -> int:
    """Return the bytes that the slices of these parameters take, each piece in whole file blocks of
    `BLOCK_BYTES`.
    """
    numbers = {each.record.number for each in held}
    found = 0
    for chunk in chunks:
        for part in chunk.slices:
            if part.param in numbers:
                sizes = [
                    (end - begin) * ELEMENT_BYTES for begin, end in _pieces(part.begin, part.end)
                ]
                blocks = sum(-(-size // BLOCK_BYTES) for size in sizes)
                found += len(chunk.fields) * blocks * BLOCK_BYTES
    return found
