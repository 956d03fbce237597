"""Checksums of tensors on any device, to be compared over ranks.

From a tensor on a device only a few numbers are downloaded: sums of its bits, weighted by their
places. They are sums of integers, which no order of adding changes, and small enough to be exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from offload import kernels

_PIECE = 1 << 20  # halves of a word that are added up at a time
_ODD = 40503


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
