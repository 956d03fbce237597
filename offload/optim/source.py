"""State that comes in, from a `state_dict`, a file, or another plan: whether it fits here, and
sources of its fields, such as tensors in a file, that are read slice by slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.core.tensors import flat, in_order_of, is_row_major, is_same_order
from offload.distributed.placing import local_of, part_of, placing_of
from offload.optim.recipe import Recipe, Record
from offload.planning.layout import MASTER, Slice

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


class FieldReader:
    """A reader of fields that come in, slice by slice. A field that is stored in another order than
    the parameter's order of memory is read whole once, and its slices are taken from there. The
    reader holds such fields of one parameter at a time.
    """

    def __init__(self) -> None:
        self._number = -1
        self._wholes: dict[int, Tensor] = {}  # by the id of their source

    def read(
        self, source: Tensor | FieldSource | KeptField, record: Record, part: Slice, target: Tensor
    ) -> None:
        """Fill `target` with a slice of a parameter's field, in the parameter's order of memory."""
        if isinstance(source, Tensor):
            own = own_part(record, source)
            target.copy_(in_order_of(own, record.local)[part.begin : part.end])
        elif isinstance(source, KeptField):
            if is_same_order(record.shape, source.stride, record.stride):
                source.part.read_into(part.begin, target)
            else:
                target.copy_(self._whole(source, record)[part.begin : part.end])
        elif not is_row_major(record.shape, record.stride):
            target.copy_(self._whole(source, record)[part.begin : part.end])
        elif source.dtype == target.dtype:
            source.read_into(part.begin * target.element_size(), as_bytes(target))
        else:
            for begin in range(0, target.numel(), _PIECE_NUMEL):
                some = target[begin : begin + _PIECE_NUMEL]
                read = torch.empty(some.numel(), dtype=source.dtype, device="cpu")
                source.read_into((part.begin + begin) * read.element_size(), as_bytes(read))
                some.copy_(read)

    def _whole(self, source: FieldSource | KeptField, record: Record) -> Tensor:
        """Return the whole field, flat, in the parameter's order of memory. Of a field that was
        kept aside, all elements must be this rank's.
        """
        if record.number != self._number:
            self._number, self._wholes = record.number, {}
        if id(source) not in self._wholes:
            self._wholes[id(source)] = in_order_of(whole(source), record.local)
        return self._wholes[id(source)]


def whole(source: FieldSource | KeptField) -> Tensor:
    """Read all of the source into host memory, in the order that it has there."""
    with torch.inference_mode(False):  # the caller may change it later
        if isinstance(source, KeptField):
            found = torch.empty_strided(
                source.shape, source.stride, dtype=torch.float32, device="cpu"
            )
            source.part.read_into(0, flat(found))
        else:
            found = torch.empty(source.shape, dtype=source.dtype, device="cpu")
            source.read_into(0, as_bytes(found))
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes; shares its memory."""
    return tensor.view(-1).view(torch.uint8)


# --- whether state fits ---------------------------------------------------------------------------


def states_of(
    optimizer: torch.optim.Optimizer, records: Sequence[Record], recipe: Recipe
) -> dict[int, dict[str, Any]]:
    """Return the state that a plain optimizer has already, by record number; raise where it does
    not fit.
    """
    numbers = {record.param: record.number for record in records}
    states = {numbers[p]: state for p, state in optimizer.state.items() if p in numbers}
    _check_states(records, recipe, states)
    return states


def fitting(
    state_dict: Mapping[str, Any], records: Sequence[Record], recipe: Recipe
) -> dict[int, Mapping[str, Any]]:
    """Return the states of a `state_dict` by the numbers of these parameters; raise where they do
    not fit.
    """
    groups = state_dict["param_groups"]
    saved = [number for group in groups for number in group["params"]]
    numbers = {number: index for index, number in enumerate(saved)}
    states = {numbers[key]: state for key, state in state_dict["state"].items() if key in numbers}
    if len(saved) == len(records):  # otherwise torch reports the mismatch
        _check_groups(records, recipe, groups)
        _check_states(records, recipe, states)
    return states


def _check_states(
    records: Sequence[Record], recipe: Recipe, states: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise `ConfigError` if a state does not fit its parameter. states: by the parameter's number.
    Changes nothing.
    """
    for number, state in states.items():
        record = records[number]
        if not is_there(record, state):
            continue
        for field in (*record.fields, *([MASTER] if MASTER in state else [])):
            value = state.get(field)
            if isinstance(value, Tensor):
                value = own_part(record, value, field)
            if not isinstance(value, Tensor | FieldSource) or not _is_plain(value, record.shape):
                got = tuple(value.shape) if isinstance(value, Tensor | FieldSource) else value
                raise ConfigError(
                    f"state of {record.name}: expected {field} of shape "
                    f"{tuple(record.param.shape)}, got {got}"
                )
        recipe.check_scalars(record, state)


def own_part(record: Record, value: Tensor, field: str = "a field") -> Tensor:
    """Return this rank's part of `value`: a DTensor placed as the parameter is, or an ordinary
    tensor. Shares its memory. Raises `ConfigError` if the part cannot be determined.
    """
    placing = placing_of(value)
    if placing == record.placing:
        return local_of(value)
    if placing is None:
        part = part_of(record.param, value)
        if part is not None:
            return part
    raise ConfigError(
        f"state of {record.name}: expected {field} that is {record.placing or 'an ordinary tensor'}"
        f", got {placing or f'an ordinary tensor of shape {tuple(value.shape)}'}; load a "
        "distributed checkpoint into what get_optimizer_state_dict(model, optimizer) gives, which "
        "cuts it anew"
        + ("" if placing is None else ", or redistribute() it, or take its full_tensor()")
    )


def _check_groups(
    records: Sequence[Record], recipe: Recipe, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse groups from a `state_dict` that need other state fields than the plan has room for."""
    each = [group for group in groups for _ in group["params"]]
    for record, group in zip(records, each, strict=True):
        fields = recipe.fields(dict(group))
        if fields != record.fields:
            raise ConfigError(
                f"{record.name}: its group in the state_dict needs the state "
                f"{fields or 'nothing'}, the plan was made for {record.fields or 'nothing'}; "
                "close(), load into the plain optimizer, and wrap or prepare again"
            )


def is_there(record: Record, state: Mapping[str, Any]) -> bool:
    """Return whether there is a state. SGD keeps a momentum_buffer of None if it has none. Master
    weights alone, saved while the momentum was 0, are no state if the recipe has fields.
    """
    names = {name for name, value in state.items() if value is not None}
    return bool(names - {MASTER} if record.fields else names)


def _is_plain(value: Tensor | FieldSource, shape: torch.Size) -> bool:
    """Return whether `value` has floating-point numbers of that shape, which can be copied."""
    if isinstance(value, FieldSource):
        return value.dtype.is_floating_point and tuple(value.shape) == tuple(shape)
    dense = value.layout == torch.strided and not value.is_meta
    return dense and value.is_floating_point() and value.shape == shape
