"""State as the plain optimizer keeps it: in the parameter's dtype, device and memory order.

State that is returned to torch must be as torch itself would have made it, or torch cannot step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.distributed import like, local_of
from offload.optim.recipe import Record
from offload.planning.layout import ELEMENT_BYTES, MASTER
from offload.storage.handout import Handout
from offload.storage.outgoing import InMemory, Outgoing

_LOG = logging.getLogger(__name__)


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
    `plain_room` made, in the parameter's memory order, and the scalars.
    """
    found = {}
    for name, value in state.items():
        if name in record.fields:
            value = _like(local_of(value), record.local, _device(record))
            found[name] = like(record.param, value)
        elif name != MASTER:
            found[name] = _number(value, record)
    return found


def _device(record: Record) -> torch.device:
    return record.original_device or record.local.device


def _like(value: Tensor, param: Tensor, device: torch.device) -> Tensor:
    """Bring `value` to the memory order and dtype of the parameter, on `device`; return `value`
    itself if it has them already.
    """
    if value.stride() != param.stride():  # fused steps go by memory alone
        value = torch.empty_like(param, dtype=value.dtype, device="cpu").copy_(value)
    return value.to(dtype=param.dtype, device=device)


def _number(value: Any, record: Record) -> Any:
    """Move a step count or another scalar to the device if the step runs there (capturable or
    fused); otherwise leave it.
    """
    there = record.group.get("capturable") or record.group.get("fused")
    device = record.original_device or record.local.device
    return value.to(device) if there and isinstance(value, Tensor) else value


def tell_what_is_lost(records: Mapping[Tensor, Record]) -> None:
    """Log a warning about the precision that is lost: a plain optimizer keeps no master weights,
    and its moments in the parameter's dtype.
    """
    half = [record for record in records.values() if record.is_half]
    if half:
        nbytes = sum(record.local.numel() for record in half) * ELEMENT_BYTES
        _LOG.warning(
            "close(): %d parameters are %s: their fp32 master (%s) is gone and their moments are "
            "rounded, as a plain optimizer has them; state_dict() before close() keeps all of it",
            len(half),
            half[0].param.dtype,
            format_size(nbytes),
        )
