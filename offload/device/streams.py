"""The streams of a transfer, and of the next one when it has ended.

A device has few of them (CUDA: 32, dealt out in turn), so that a program that makes and ends many
transfers would come to share one with itself. And memory that a stream has freed is kept for that
stream: a new one would find none of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch


class Streams:
    """Of one device: `up` and `down`, and a third where it is needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up = torch.Stream(device)
        self.down = torch.Stream(device)
        self._between: torch.Stream | None = None  # most have one device

    @property
    def between(self) -> torch.Stream:
        """For what happens between devices. One thread at a time."""
        if self._between is None:
            self._between = torch.Stream(self.device)
        return self._between


_IDLE: dict[torch.device, deque[Streams]] = {}  # without a lock: finalizers give back, too


def lend(to: object, device: torch.device) -> tuple[Streams, Callable[[], object]]:
    """For one transfer, until it calls what is returned beside them, or is forgotten. It starts no
    copies then; those that it has started come first for the next one.
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
    """The next transfers have new ones."""
    _IDLE.clear()
