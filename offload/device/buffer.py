"""Device memory that is filled from the host, used and released, against a budget in bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.tensors import holders
from offload.core.ticket import Ticket
from offload.device.streams import on

ALIGN = 512  # torch's allocators round up to it


class DeviceFullError(CapacityError):
    """An error that says that the device itself has no memory left, even within the budget."""


class MemoryHolder(Protocol):
    """A holder of device memory that it can do without, such as a cache."""

    def make_way(self, device: torch.device, nbytes: int) -> None:
        """Release `nbytes` of it, or as much as it can. Any thread; never waits for another one."""


HOLDERS: weakref.WeakSet[MemoryHolder] = weakref.WeakSet()  # release memory if a device is full

# Begins the copy of a host tensor to a device tensor on `up`, both flat bytes, after these events;
# calls back, before any later copy, with the event that ends it.
Upload = Callable[
    [Tensor, Tensor, str, list[torch.Event], Callable[[torch.Event], None]], Ticket[None]
]
# Calls a function whose work goes to the stream between devices, after these events, and returns
# the event that ends it.
Across = Callable[[Callable[[], None], list[torch.Event]], torch.Event]


class DeviceMemory:
    """The memory of one device that the engine allocates, from the allocator's memory of the stream
    `up`, and its budget. Any thread may call; never blocks.
    """

    def __init__(self, device: torch.device, up: torch.Stream, budget_bytes: int | None) -> None:
        self.device = device
        self.up = up
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._used_bytes = 0
        self._returned: deque[int] = deque()  # sizes that were released; finalizers append them
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The bytes in use: held by a buffer, or by a view that outlives its buffer."""
        with self._lock:
            self._take_in_returned()
            return self._used_bytes

    def allocate(self, nbytes: int, what: str, is_urgent: bool = True) -> Tensor:
        """Allocate `nbytes`, uninitialised. Raises `CapacityError` with the numbers when the budget
        is spent, `DeviceFullError` when the device is. is_urgent: if the device is full, first
        have all `HOLDERS` release idle memory and try again.
        """
        if nbytes < 0:
            raise ConfigError(f"{what}: expected 0 bytes or more, got {nbytes}")
        size = -(-nbytes // ALIGN) * ALIGN
        self._take(size, what)
        try:
            memory = self._take_from_device(nbytes, is_urgent)
        except BaseException as error:
            self._returned.append(size)
            if isinstance(error, torch.OutOfMemoryError):
                raise DeviceFullError(
                    f"{self.device}: {what} needs {format_size(size)} ({size} bytes), which the "
                    f"device does not have; {format_size(self.used_bytes)} are in use here, the "
                    "rest elsewhere in this process or in others; lower device_memory, or use less"
                ) from error
            raise
        weakref.finalize(memory.untyped_storage(), self._returned.append, size).atexit = False
        return memory

    def _take_from_device(self, nbytes: int, is_urgent: bool) -> Tensor:
        try:
            return self._empty(nbytes)
        except torch.OutOfMemoryError:
            if not is_urgent:
                raise
        for holder in list(HOLDERS):
            holder.make_way(self.device, nbytes)
        torch.accelerator.empty_cache()  # released memory may be cached in segments of other sizes
        return self._empty(nbytes)

    def _empty(self, nbytes: int) -> Tensor:
        with on(self.up):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _take(self, size: int, what: str) -> None:
        with self._lock:
            self._take_in_returned()
            used, budget = self._used_bytes, self.budget_bytes
            if budget is not None and used + size > budget:
                raise CapacityError(
                    f"{self.device}: {what} needs {format_size(size)} ({size} bytes), "
                    f"{format_size(budget - used)} of {format_size(budget)} are free; raise "
                    "device_memory, or use less"
                )
            self._used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)

    def _take_in_returned(self) -> None:
        while self._returned:
            self._used_bytes -= self._returned.popleft()


@dataclass
class _Loan:
    """A loan of memory of `up`, with the event that ends its last fill and the other streams that
    have used it. It is separate from the buffer, so that the finalizer of a buffer that was never
    released returns its memory in order, too.
    """

    memory: Tensor | None
    up: torch.Stream
    filled: torch.Event
    users: list[torch.Stream] = field(default_factory=list)

    def give_back(self) -> bool:
        """Release the memory in the order of `up`, after its users. Return False if a view of it
        still exists; then the allocator keeps the memory until the view is freed and the users'
        streams are past it.
        """
        memory, self.memory = self.memory, None
        if memory is None:
            return True
        escaped = holders(memory) > 1
        self.up.wait_event(self.filled)  # other devices may have filled it, with no use since
        for stream in self.users:
            self.up.wait_event(stream.record_event())
            if escaped:
                memory.record_stream(stream)
        return not escaped


class DeviceBuffer:
    """A range of device memory with one holder.

    Any thread may fill it. Only threads that compute may call `use` and `release`.
    """

    def __init__(
        self, memory: Tensor, up: torch.Stream, upload: Upload, across: Across, what: str
    ) -> None:
        self.what = what
        self.nbytes = memory.nbytes
        # Earlier work on `up` must be over as well: fills of the memory's last holder.
        self._loan = _Loan(memory, up, up.record_event())
        self._upload, self._across = upload, across
        weakref.finalize(self, self._loan.give_back).atexit = False

    def fill(self, host: Tensor, offset_bytes: int = 0) -> Ticket[None]:
        """Copy `host` to the buffer's bytes from `offset_bytes` on. Parts may be copied as they
        become ready, so that one is copied while the next is read from the store; bytes that are in
        use are overwritten after that use. `host` is held until the ticket is done. Never blocks.
        """
        memory, end = self._memory(), offset_bytes + host.nbytes
        if not 0 <= offset_bytes <= end <= self.nbytes:
            raise ConfigError(
                f"{self.what}: bytes [{offset_bytes}, {end}) are not within {self.nbytes}"
            )
        if not host.is_contiguous():
            raise ConfigError(f"{self.what}: expected a contiguous host tensor to copy from")
        flat = host.detach().view(-1).view(torch.uint8)
        target = memory[offset_bytes:end]
        return self._upload(flat, target, self.what, self.busy(), self._note_filled)

    def spread(self, act: Callable[[Tensor], None]) -> None:
        """Have `act` fill the buffer's bytes, or some of them, from other devices: its work is
        queued on the stream between devices, after all fills and uses so far. Never blocks.
        """
        memory = self._memory()
        self._note_filled(self._across(lambda: act(memory), self.busy()))

    def note_fill(self) -> None:
        """Note that work that fills the bytes is queued on this thread's current stream, after
        `use`: the next use waits for it, on any stream.
        """
        self._note_filled(torch.accelerator.current_stream(self._memory().device).record_event())

    def busy(self) -> list[torch.Event]:
        """Return the events after which the bytes may be written again, and after which all bytes
        written so far are there: the end of the fills, and of all work queued so far on the streams
        that use them.
        """
        return [self._loan.filled, *(stream.record_event() for stream in self._loan.users)]

    def _note_filled(self, event: torch.Event) -> None:
        self._loan.filled = event

    @property
    def views(self) -> int:
        """The number of tensors that lie in its memory, beside its own."""
        return holders(self._memory()) - 1

    @property
    def address(self) -> int:
        return self._memory().untyped_storage().data_ptr()

    def use(self) -> Tensor:
        """Return the buffer's bytes for use on this thread's current stream, which waits for the
        fills so far. The caller may make views, which it frees before `release`.
        """
        memory = self._memory()
        stream = torch.accelerator.current_stream(memory.device)
        stream.wait_event(self._loan.filled)
        if stream not in self._loan.users:
            self._loan.users.append(stream)
        return memory.detach()  # a separate tensor, so that `release` can count the references

    def release(self) -> bool:
        """Release the memory, after all work queued so far on the streams that use it. Idempotent.

        Return False if a view of it still exists. The view stays valid, and its memory counts
        against the budget until the view is freed. (Then the allocator may need a moment longer
        until it has the memory back: the one case in which more than the budget can be in use.)
        """
        return self._loan.give_back()

    def _memory(self) -> Tensor:
        if self._loan.memory is None:
            raise StateError(f"{self.what}: the device buffer has been released")
        return self._loan.memory

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
