"""The same where the device is the CPU: device and host are one memory, so nothing moves."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.core.ticket import Ticket
from offload.device.checks import check_copy, cut


class HostBuffer:
    """The answer of `HostTransfer.fetch`: the host's own bytes."""

    arrived = True

    def __init__(self, host: Tensor, what: str) -> None:
        self.what = what
        self.nbytes = host.nbytes
        self._bytes: Tensor | None = host.detach().view(-1).view(torch.uint8)

    def use(self) -> Tensor:
        if self._bytes is None:
            raise StateError(f"{self.what}: the buffer has been released")
        return self._bytes

    def release(self) -> bool:
        """Let go of the host's memory, which its lease takes care of. Idempotent."""
        self._bytes = None
        return True

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class HostTransfer:
    """The same where the device is the CPU: device and host are one memory, so nothing moves."""

    zero_copy = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def fetch(self, host: Tensor, what: str = "a block") -> HostBuffer:
        return HostBuffer(host, what)

    def mark(self) -> None:
        return None

    def write(
        self, host: Tensor, target: Tensor, after: None = None, what: str = "a copy"
    ) -> Ticket[Tensor]:
        """Make `target` what `host` is, at once; nothing is done where they are one memory."""
        check_copy(host, target, what)
        if host.data_ptr() != target.data_ptr():
            target.copy_(host)
        return Ticket.of(target, what)

    def join(self) -> None:
        return None

    def read(
        self, source: Tensor, host: Tensor | None, what: str = "a copy", after: None = None
    ) -> Ticket[Tensor]:
        """The result is `source`: it is where it should be. `host` is not needed."""
        return Ticket.of(source, what)

    def read_in_parts(
        self,
        source: Tensor,
        host: Tensor | None,
        part_bytes: int,
        what: str = "a copy",
        after: None = None,
    ) -> list[Ticket[Tensor]]:
        flat = source.detach().view(-1)
        parts = cut(flat.numel(), part_bytes // flat.element_size())
        return [Ticket.of(flat[part], what) for part in parts]

    def close(self) -> None:
        return None
