"""Export of whole optimizer state: from the chunks, or from where it is kept between two plans.

It is exported as it is, in fp32, or as torch would have made it: in the parameter's dtype, device
and memory order, or torch could not step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError, StoreError
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.distributed.placing import like, local_of
from offload.optim.recipe import Record
from offload.optim.source import FieldPart, KeptField
from offload.planning.layout import ELEMENT_BYTES, MASTER, Chunk
from offload.storage.disk import DiskStore
from offload.storage.files import BLOCK_BYTES
from offload.storage.handout import Handout, InMemory, Outgoing, Refusal, allow_memory

_PIECE_NUMEL = 1 << 20  # elements of kept state that are stored and read at once
States = dict[Tensor, dict[str, Any]]  # by parameter, as torch keeps it
# Makes the target for a field of the state; for a DTensor, of this rank's part. None: the field is
# not exported.
Room = Callable[[Handout, Record, str], Outgoing | None]


class ParamOptimizerState(NamedTuple):
    """The state of one parameter: the names of its fields, and all state that is not elementwise
    (`scalars`).
    """

    record: Record
    fields: tuple[str, ...]
    scalars: dict[str, Any]


class FieldTarget(Protocol):
    """A destination for the elements of a field: `write` takes those from `begin` on, in the order
    of memory.
    """

    def write(self, begin: int, values: Tensor) -> None: ...


# Destinations by the number of the parameter and the name of the field.
Targets = Mapping[int, Mapping[str, FieldTarget]]


class OptimizerStateHolder(Protocol):
    """The holder of the state, or of this rank's part of it."""

    def held(self) -> Sequence[ParamOptimizerState]:
        """List the state of every parameter that has any."""

    def copy_out(self, targets: Targets) -> None:
        """Write all elements of these fields that this rank holds to their targets."""


class OptimizerStateGatherer(Protocol):
    """The all-gather of state over the ranks that share it. All ranks call it with the same groups
    and fields.
    """

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The numbers of the parameters that are gathered at once."""

    def whole(self, field: str, own: Mapping[int, FieldPart]) -> Mapping[int, Tensor]:
        """Gather one field of the parameters of one group from all ranks, flat, in ordinary host
        memory. own: this rank's parts.
        """


def export(
    origin: OptimizerStateHolder,
    room: Room,
    gatherer: OptimizerStateGatherer | None,
    directories: Sequence[Path],
    metrics: Metrics,
) -> States:
    """Export the state of every parameter, as tensors; a DTensor's part as a DTensor. gatherer:
    None if this rank holds all of the state. directories: where tensors that do not fit in memory
    are put.
    """
    records = {held.record.number: held.record for held in origin.held()}
    with Handout(directories, metrics, defers=gatherer is not None) as handout:
        states = _write_out(origin, lambda *of: room(handout, *of), gatherer)
        handout.finish()
        return {
            records[number].param: {
                name: like(records[number].param, value.tensor)
                if isinstance(value, Outgoing)
                else value
                for name, value in state.items()
            }
            for number, state in states.items()
        }


def _write_out(
    origin: OptimizerStateHolder,
    make: Callable[[Record, str], Outgoing | None],
    gatherer: OptimizerStateGatherer | None,
) -> dict[int, dict[str, Any]]:
    """Return the state of every parameter, by number, with the destinations that its fields were
    written to.
    """
    found: dict[int, dict[str, Any]] = {}
    places: dict[int, dict[str, Outgoing]] = {}
    records: dict[int, Record] = {}
    for held in origin.held():
        number = held.record.number
        made = {field: make(held.record, field) for field in held.fields}
        places[number] = {field: one for field, one in made.items() if one is not None}
        found[number], records[number] = {**held.scalars, **places[number]}, held.record
    groups = gatherer.groups if gatherer is not None else ()
    shared = {number for group in groups for number in group}
    origin.copy_out({n: each for n, each in places.items() if n not in shared})
    for group in groups:
        assert gatherer is not None
        having = {number: places[number] for number in group if places.get(number)}
        _complete(origin, gatherer, having, records)
    return found


def _complete(
    origin: OptimizerStateHolder,
    gatherer: OptimizerStateGatherer,
    places: Mapping[int, Mapping[str, Outgoing]],
    records: Mapping[int, Record],
) -> None:
    """Copy this rank's part of a group to ordinary memory, then gather and write out one field
    after the other.
    """
    own = {
        number: {field: FieldPart.empty(*records[number].own_range) for field in each}
        for number, each in places.items()
    }
    origin.copy_out(own)
    for field in dict.fromkeys(field for each in own.values() for field in each):
        parts = {number: each[field] for number, each in own.items() if field in each}
        for number, values in gatherer.whole(field, parts).items():
            places[number][field].write(0, values)


def exact_room(handout: Handout, record: Record, field: str) -> Outgoing:
    """Allocate the destination for a field as it is, in fp32."""
    return handout.room(record.shape, record.stride, torch.float32)


def plain_room(handout: Handout, record: Record, field: str) -> Outgoing | None:
    """Allocate the destination for a field as torch keeps it; None for the master weights, which
    torch does not have.
    """
    if field not in record.fields:
        return None
    shape, stride, param = record.shape, record.stride, record.local
    if stride != param.stride():  # the order has changed since: `plain_state` copies it again
        return InMemory(torch.empty_strided(shape, stride, dtype=torch.float32, device="cpu"))
    device = _device(record)
    if device.type == "cpu":
        return handout.room(shape, stride, param.dtype)
    return InMemory(torch.empty_strided(shape, stride, dtype=param.dtype, device=device))


def plain_state(record: Record, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state as torch keeps it: the fields that were written to the places that
    `plain_room` made, in the parameter's memory order, dtype and device, and the scalars, which are
    on the device if the step runs there (capturable or fused).
    """
    found, param = {}, record.local
    steps_there = record.group.get("capturable") or record.group.get("fused")
    for name, value in state.items():
        if name in record.fields:
            value = local_of(value)
            if value.stride() != param.stride():  # fused steps go by memory alone
                value = torch.empty_like(param, dtype=value.dtype, device="cpu").copy_(value)
            found[name] = like(record.param, value.to(dtype=param.dtype, device=_device(record)))
        elif name != MASTER:
            is_moved = steps_there and isinstance(value, Tensor)
            found[name] = value.to(_device(record)) if is_moved else value
    return found


def _device(record: Record) -> torch.device:
    return record.original_device or record.local.device


def tell_what_is_lost(records: Mapping[Tensor, Record]) -> None:
    """Log a warning about the precision that is lost: a plain optimizer keeps no master weights,
    and its moments in the parameter's dtype.
    """
    half = [record for record in records.values() if record.is_half]
    if half:
        nbytes = sum(record.local.numel() for record in half) * ELEMENT_BYTES
        LOG.warning(
            "close(): %d parameters are %s: their fp32 master (%s) is gone and their moments are "
            "rounded, as a plain optimizer has them; state_dict() before close() keeps all of it",
            len(half),
            half[0].param.dtype,
            format_size(nbytes),
        )


# --- kept aside between two plans -----------------------------------------------------------------


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
            h.record.number: {field: FieldPart.empty(*h.record.own_range) for field in h.fields}
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
                for begin, end in _pieces(*record.own_range):
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
