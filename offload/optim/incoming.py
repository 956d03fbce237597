"""The check of optimizer state from a `state_dict` or a plain optimizer: whether it fits here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.distributed import local_of, part_of, placing_of
from offload.optim.recipe import Recipe, Record
from offload.optim.source import FieldSource
from offload.planning.layout import MASTER


def states_of(
    optimizer: torch.optim.Optimizer, records: Sequence[Record], recipe: Recipe
) -> dict[int, dict[str, Any]]:
    """Return the state that a plain optimizer has already, by record number; raise where it does
    not fit.
    """
    numbers = {record.param: record.number for record in records}
    states = {numbers[p]: state for p, state in optimizer.state.items() if p in numbers}
    check_states(records, recipe, states)
    return states


def check_states(
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


def check_groups(
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
