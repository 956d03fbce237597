"""Optimizer state on its way out, whole: from the chunks, or from where it was kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from offload.optim.recipe import Record
from offload.optim.source import FieldPart, own_range
from offload.storage.outgoing import Outgoing


class Held(NamedTuple):
    """The state of one parameter: names of its fields, and all that is not elementwise."""

    record: Record
    fields: tuple[str, ...]
    scalars: dict[str, Any]


class FieldTarget(Protocol):
    """Takes the elements of a field, from `begin` on, in the order of memory."""

    def write(self, begin: int, values: Tensor) -> None: ...


# By the number of the parameter and the name of the field.
Targets = Mapping[int, Mapping[str, FieldTarget]]


class Origin(Protocol):
    """Who has the state, or our own part of it."""

    def held(self) -> Sequence[Held]:
        """What there is of every parameter that has state."""

    def copy_out(self, targets: Targets) -> None:
        """Write all elements of these fields that are here."""


class Gatherer(Protocol):
    """Ranks that have the rest. All of them come with the same groups and fields."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Numbers of parameters that are put together at once."""

    def whole(self, field: str, own: Mapping[int, FieldPart]) -> Mapping[int, Tensor]:
        """A field of parameters of one group, flat, in ordinary memory: ours and everybody's."""


# Gives the place for a field of a parameter's state; None: it stays here.
Make = Callable[[Record, str], Outgoing | None]


def export(origin: Origin, make: Make, gatherer: Gatherer | None) -> dict[int, dict[str, Any]]:
    """The state of every parameter by number, with the places that its fields were written to.
    gatherer: None, all of it is here.
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
    origin: Origin,
    gatherer: Gatherer,
    places: Mapping[int, Mapping[str, Outgoing]],
    records: Mapping[int, Record],
) -> None:
    """Our own part in ordinary memory, one field after the other with everybody's, and out."""
    own = {
        number: {field: FieldPart.empty(*own_range(records[number])) for field in each}
        for number, each in places.items()
    }
    origin.copy_out(own)
    for field in dict.fromkeys(field for each in own.values() for field in each):
        parts = {number: each[field] for number, each in own.items() if field in each}
        for number, values in gatherer.whole(field, parts).items():
            places[number][field].write(0, values)
