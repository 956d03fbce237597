"""The facts that must be the same on ranks that share parameters, for a consensus on them.

Values are compared by their checksums. From a tensor on a device only a few numbers are downloaded:
sums of its bits, weighted by their places. They are sums of integers, which no order of adding
changes, and small enough to be exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload import kernels
from offload.core.tensors import flat
from offload.distributed.consensus import SAME, checksum_of, told_checksum
from offload.optim.recipe import Record

VALUES = "the values of"
START_ALIKE = (
    "every rank must begin with the same: seed them alike, load the same weights, or broadcast "
    "rank 0's before (or give process_group=False, if they have nothing to do with one another)"
)
_PIECE = 1 << 20  # halves of a word that are added up at a time
_ODD = 40503


def settings_sum(records: Sequence[Record]) -> str:
    """Return a checksum of the learning rates and all other settings of parameter groups."""
    groups = {id(record.group): record.group for record in records}
    table = [
        sorted((key, repr(value)) for key, value in group.items() if "param" not in key)
        for group in groups.values()
    ]
    return checksum_of(table)


def start_facts(records: Sequence[Record]) -> dict[str, Any]:
    """Collect the facts that must be equal on all ranks that share these parameters, by name: the
    shape, dtype, strides and frozenness of each parameter, then the checksums of their values.
    """
    found: dict[str, Any] = {"the number of parameters": len(records)}
    for record in records:
        kind = [list(record.shape), str(record.dtype), list(record.stride), record.is_frozen]
        found[f"shape, type or requires_grad of {record.name}"] = kind
    values = {record.name: flat(record.param) for record in records}
    return found | value_facts(VALUES, values)


def remedy_at_start(name: str) -> str:
    """Return the advice for ranks that differ in the start fact with this name."""
    return START_ALIKE if name.startswith(VALUES) else SAME


def value_facts(what: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return checksums of named flat tensors, by `what` and the name."""
    found = checksums(list(tensors.values()))
    return {f"{what} {name}": told_checksum(one) for name, one in zip(tensors, found, strict=True)}


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Compute a checksum of each flat tensor. The CPU waits for each device once."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    found = {number: kernels.checksum(one) for number, one in enumerate(tensors) if one.is_cpu}
    for device in devices:
        there = {number: _sums(one) for number, one in enumerate(tensors) if one.device == device}
        told, begin = torch.cat(list(there.values())).tolist(), 0
        for number, sums in there.items():
            end = begin + sums.numel()
            found[number] = zlib.crc32(repr(told[begin:end]).encode())
            begin = end
    return [found[number] for number in range(len(tensors))]


def _sums(tensor: Tensor) -> Tensor:
    """Compute one weighted sum for each part of `_PIECE` halves of a word: less than 2 ** 55."""
    bits = tensor.detach().view(torch.int16)
    sums = [_weighted(bits[at : at + _PIECE]) for at in range(0, len(bits), _PIECE)]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=tensor.device)


def _weighted(bits: Tensor) -> Tensor:
    """Sum the bits, each place of a part with a weight of its own, so that an exchange of places
    shows.
    """
    places = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device)
    weights = places.mul_(_ODD).bitwise_and_(_PIECE - 1).add_(1)
    return weights.mul_(bits).sum()
