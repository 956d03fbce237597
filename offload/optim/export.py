"""Export of whole optimizer state: from the chunks, or from where it is kept between two plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from offload.optim.recipe import Record
from offload.optim.source import FieldPart, own_range
from offload.storage.outgoing import Outgoing


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


# Makes the destination for a field of a parameter's state; None: the field is not exported.
Make = Callable[[Record, str], Outgoing | None]


def export(
    origin: OptimizerStateHolder, make: Make, gatherer: OptimizerStateGatherer | None
) -> dict[int, dict[str, Any]]:
    """Export the state of every parameter, by number, with the destinations that its fields were
    written to. gatherer: None if this rank holds all of the state.
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
        number: {field: FieldPart.empty(*own_range(records[number])) for field in each}
        for number, each in places.items()
    }
    origin.copy_out(own)
    for field in dict.fromkeys(field for each in own.values() for field in each):
        parts = {number: each[field] for number, each in own.items() if field in each}
        for number, values in gatherer.whole(field, parts).items():
            places[number][field].write(0, values)
