"""The transfer for the CPU as the device: device and host are one memory, so nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.device.device import DeviceTransfer
from offload.device.streams import check_copy


class HostBuffer:
    """A buffer that `HostTransfer.fetch` returns: the host's own bytes."""

    def __init__(self, host: Tensor, what: str) -> None:
        self.what = what
        self.nbytes = host.nbytes
        self._bytes: Tensor | None = host.detach().view(-1).view(torch.uint8)

    def use(self) -> Tensor:
        if self._bytes is None:
            raise StateError(f"{self.what}: the buffer has been released")
        return self._bytes

    def release(self) -> bool:
        """Drop the reference to the host memory, which belongs to its lease. Idempotent."""
        self._bytes = None
        return True


class HostTransfer:
    """A transfer with the interface of `DeviceTransfer` for the CPU, where nothing is copied."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def fetch(self, host: Tensor, what: str = "a block") -> HostBuffer:
        return HostBuffer(host, what)

    def mark(self) -> None:
        return None

    def write(
        self, host: Tensor, target: Tensor, after: None = None, what: str = "a copy"
    ) -> Ticket[Tensor]:
        """Copy `host` to `target` at once, unless they are the same memory. The ticket is done."""
        check_copy(host, target, what)
        if host.data_ptr() != target.data_ptr():
            target.copy_(host)
        return Ticket.of(target, what)

    def join(self) -> None:
        return None

    def read(
        self, source: Tensor, host: Tensor | None, what: str = "a copy", after: None = None
    ) -> Ticket[Tensor]:
        """Return a ticket that is done, with `source` itself as its result; `host` is not used."""
        return Ticket.of(source, what)

    def close(self) -> None:
        return None


Transfer = DeviceTransfer | HostTransfer


def open_transfer(
    device: torch.device | str, budget_bytes: int | None = None, metrics: Metrics | None = None
) -> Transfer:
    """Open the transfer that copies bytes to and from `device`. budget_bytes: of device memory;
    ignored for the CPU.
    """
    if torch.device(device).type == "cpu":
        return HostTransfer()
    return DeviceTransfer(device, budget_bytes, metrics=metrics)
