"""The streams of transfers, which the next transfer uses again when one has ended, and what a copy
on them must be.

A device has few streams (CUDA: a pool of 32, assigned in turn), so that a program that makes and
ends many transfers would get the same stream twice. Also, the allocator keeps memory freed on a
stream for that stream: a new one could not use it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from offload.core.errors import ConfigError

Moment = torch.Event  # an event that streams can wait for; other packages only pass it on


class Streams:
    """The side streams of one device: `up` and `down`, and `between` if it is needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up = torch.Stream(device)
        self.down = torch.Stream(device)

    @cached_property
    def between(self) -> torch.Stream:
        """The stream for copies and collectives between devices, made at the first use, since most
        programs use one device only. One thread at a time.
        """
        return torch.Stream(self.device)


_IDLE: dict[torch.device, deque[Streams]] = {}  # without a lock, since finalizers append to it


def lend(to: object, device: torch.device) -> tuple[Streams, Callable[[], object]]:
    """Lend streams to one transfer until it calls the returned function, or is garbage-collected.
    After that it must start no copies; copies of its own in flight run before those of the next
    transfer.
    """
    try:
        streams = _IDLE[device].pop()
    except LookupError:
        streams = Streams(device)
    give_back = weakref.finalize(to, _take_back, streams)
    give_back.atexit = False
    return streams, give_back


def _take_back(streams: Streams) -> None:
    _IDLE.setdefault(streams.device, deque()).append(streams)


def forget() -> None:
    """Drop the idle streams, so that the next transfers make new ones."""
    _IDLE.clear()


def on(stream: torch.Stream) -> torch.Stream:
    """Return `stream` as a new object to enter with `with`. torch keeps the stream and device to
    restore in the object, so that two threads that enter the same one would restore each other's.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


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
