"""Checks of tensors to copy and of devices; how a thread enters a stream."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from offload.core.errors import ConfigError


def on(stream: torch.Stream) -> torch.Stream:
    """Return `stream` as a new object to enter with `with`. torch keeps the stream and device to
    restore in the object, so that two threads that enter the same one would restore each other's.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def indexed(device: torch.device) -> torch.device:
    """Return `device` with its index: `cuda` is the current one. Raises `ConfigError` if torch sees
    no such device.
    """
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
    """Return the index of the current device. If that is 0, as when the user's code has set none,
    and torchrun has started this rank, return its local rank if it sees that many devices: all
    ranks would be on the first device otherwise.
    """
    current, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdecimal() and int(local) < torch.accelerator.device_count():
        return int(local)
    return current


def check_copy(host: Tensor, device: Tensor, what: str) -> None:
    """Check that a copy between the two moves plain bytes; only such a copy can run asynchronously.
    Raises `ConfigError`.
    """
    if host.dtype != device.dtype or host.shape != device.shape:
        raise ConfigError(
            f"{what}: expected the same shape and dtype on both sides, got "
            f"{tuple(host.shape)} {host.dtype} on the host, {tuple(device.shape)} {device.dtype} "
            "on the device"
        )
    for side, tensor in (("host", host), ("device", device)):
        if not tensor.is_contiguous():
            raise ConfigError(f"{what}: expected a contiguous {side} tensor")
