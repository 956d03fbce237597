"""States that come from outside, from a `state_dict` or a plain optimizer: whether they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.layout import MASTER
from offload.optim.recipe import Recipe, Record
from offload.optim.source import Source


def check_states(
    records: Sequence[Record], recipe: Recipe, states: Mapping[int, Mapping[str, Any]]
) -> None:
    """Refuse states, by the numbers of their parameters, that do not fit. Changes nothing."""
    for number, state in states.items():
        record = records[number]
        if not is_there(record, state):
            continue
        for field in (*record.fields, *([MASTER] if MASTER in state else [])):
            value = state.get(field)
            if not isinstance(value, Tensor | Source) or not _is_plain(value, record.shape):
                got = tuple(value.shape) if isinstance(value, Tensor | Source) else value
                raise ConfigError(
                    f"state of {record.name}: expected {field} of shape "
                    f"{tuple(record.param.shape)}, got {got}"
                )
        recipe.check_scalars(record, state)


def is_there(record: Record, state: Mapping[str, Any]) -> bool:
    """Whether there is a state. SGD keeps a momentum_buffer of None where there is none. A master
    alone, from a time without momentum, is no state where there should be more.
    """
    names = {name for name, value in state.items() if value is not None}
    return bool(names - {MASTER} if record.fields else names)


def _is_plain(value: Tensor | Source, shape: torch.Size) -> bool:
    """Whether it has numbers of that shape, which can be copied."""
    if isinstance(value, Source):
        return value.dtype.is_floating_point and tuple(value.shape) == tuple(shape)
    dense = value.layout == torch.strided and not value.is_meta
    return dense and value.is_floating_point() and value.shape == shape
