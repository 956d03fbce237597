"""What can be copied, how a copy is cut, and how a thread gets on a stream."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from offload.core.errors import ConfigError


def on(stream: torch.Stream) -> torch.Stream:
    """`stream` to enter with `with`. A new object each time: torch keeps what to go back to in the
    object, so that two threads in the same one would leave each other's streams and devices behind.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def indexed(device: torch.device) -> torch.device:
    """`device` with its number: `cuda` is the current one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        there = "the CPU alone" if accelerator is None else accelerator.type
        raise ConfigError(
            f"device: expected {there} here, got {device}; torch sees no such device: `offload "
            "doctor` tells what it sees, and a build of torch for it is at pytorch.org"
        )
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def own_index() -> int:
    """The current device; where nobody has chosen one, a rank that torchrun has started has that of
    its number on the machine, if it sees so many: all would be on the first otherwise.
    """
    current, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdecimal() and int(local) < torch.accelerator.device_count():
        return int(local)
    return current


def check_copy(host: Tensor, device: Tensor, what: str) -> None:
    """A copy between the two is a plain move of bytes, which alone can run beside the CPU."""
    if host.dtype != device.dtype or host.shape != device.shape:
        raise ConfigError(
            f"{what}: expected the same shape and dtype on both sides, got "
            f"{tuple(host.shape)} {host.dtype} on the host, {tuple(device.shape)} {device.dtype} "
            "on the device"
        )
    for side, tensor in (("host", host), ("device", device)):
        if not tensor.is_contiguous():
            raise ConfigError(f"{what}: expected a contiguous {side} tensor")


def cut(numel: int, part: int) -> Iterator[slice]:
    """Slices of `part` elements that cover [0, numel); one empty slice where there is nothing."""
    step = max(part, 1)
    for begin in range(0, max(numel, 1), step):
        yield slice(begin, min(begin + step, numel))
