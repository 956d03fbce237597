"""Collectives between the fake devices of several processes, as NCCL has them: work goes to a
stream of the group's own, which waits for the stream that is current when they are called; `wait`
lets the current stream wait for it, and the CPU does not. Between processes the bytes go over gloo,
in the order of the stream; only there the CPU waits, in place of the device.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "fakeccl"


def register() -> None:
    """Make it torch's backend for the device, in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["fake"])


def _make(store: Any, rank: int, count: int, timeout: timedelta) -> FakeGroup:
    return FakeGroup(store, rank, count, timeout)


class _Work(dist._Work):
    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()
        self._event = stream.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()


class FakeGroup(dist.ProcessGroup):
    """A process group that has the calls that offload makes, and no more."""

    def __init__(self, store: Any, rank: int, count: int, timeout: timedelta) -> None:
        super().__init__(rank, count)
        self._rank, self._count = rank, count
        self._gloo = dist.ProcessGroupGloo(store, rank, count, timeout)
        self._stream = torch.Stream("fake")

    def size(self) -> int:
        return self._count

    def abort(self) -> None:
        """Do nothing: no device waits for another rank here."""

    def shutdown(self) -> None:
        self._gloo = None

    def getBackendName(self) -> str:
        return NAME

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        def act() -> None:
            parts = self._everybody(given)
            output.view(-1).copy_(torch.cat(parts).view(output.dtype), non_blocking=True)

        return self._run(act)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        """Sum in the order of ranks, in the type of `given`."""

        def act() -> None:
            whole = [part.view(given.dtype) for part in self._everybody(given)]
            rows = [part.view(self._count, -1)[self._rank] for part in whole]
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            output.view(-1).copy_(total, non_blocking=True)

        return self._run(act)

    def _everybody(self, given: Tensor) -> list[Tensor]:
        """Return the bytes of all ranks, once the stream has done its earlier work."""
        own = given.detach().cpu().reshape(-1).view(torch.uint8)  # waits for the stream
        found = [torch.empty_like(own) for _ in range(self._count)]
        self._gloo.allgather([found], [own]).wait()
        return found

    def _run(self, act: Any) -> _Work:
        current = torch.accelerator.current_stream()
        self._stream.wait_event(current.record_event())
        with torch.Stream(
            stream_id=self._stream.stream_id,
            device_index=self._stream.device_index,
            device_type=self._stream.device_type,
        ):
            act()
        return _Work(self._stream)
