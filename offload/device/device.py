"""Copies to and from one accelerator, on two side streams, and a third stream for copies and
collectives between devices.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offload.core.errors import ConfigError, StateError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.core.timeline import TO_DEVICE, TO_HOST, Event
from offload.device.accelerator import indexed
from offload.device.buffer import DeviceBuffer, DeviceMemory
from offload.device.streams import check_copy, lend, on

READS_IN_FLIGHT_BYTES = 256 << 20
_Landings: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
_LOOK_AGAIN_S = 0.0005  # poll interval of waits with a deadline, which torch's events do not offer


@dataclass(frozen=True)
class Mark:
    """A place on a stream: after all work queued on it so far."""

    stream: torch.Stream
    event: torch.Event


@dataclass(eq=False)
class _InFlightCopy:
    """A copy in flight. held: the tensors whose memory must not be released before it is over.
    owner: of a download, the stream in whose order `source` may be released before that; None: it
    must be held until then.
    """

    event: torch.Event
    ticket: Ticket[Any]
    result: Tensor | None
    held: tuple[Tensor, ...]
    nbytes: int
    source: Tensor | None = None
    owner: torch.Stream | None = None
    begin_s: float = field(default_factory=time.perf_counter)

    def let_go(self) -> None:
        """Release the tensors of a copy that is over. It comes before the ticket ends, so that
        callers that wait for the ticket find no reference to their memory here.
        """
        self.held, self.source = (), None


class _Flights:
    """The copies in flight on one stream, in its order. They are separate from the transfer, so
    that the finalizer of a transfer that was never closed waits for them, too.
    """

    def __init__(self, stream: torch.Stream, row: str, metrics: Metrics) -> None:
        self.stream, self.row, self.metrics = stream, row, metrics
        self.lock = threading.Lock()
        self.queue: deque[Any] = deque()

    def settle(self) -> None:
        """End the tickets of the copies that are over. Never blocks."""
        while True:
            with self.lock:
                if not self.queue or not self.queue[0].event.query():
                    return
                flight = self.queue.popleft()
            # The end is now, when it is noticed, which may be later than the copy's own end.
            what, end_s = flight.ticket.what, time.perf_counter()
            self.metrics.event(Event(self.row, what, flight.begin_s, end_s, flight.nbytes))
            flight.let_go()
            flight.ticket.finish(flight.result)

    def land(self, flight: _InFlightCopy, timeout_s: float | None) -> None:
        """Block until the copy is over, or `timeout_s` has passed; then end the tickets of the
        copies that are over. A device error ends this copy's ticket with that error.
        """
        try:
            with self.metrics.span("device copy"):
                _wait_for(flight.event, timeout_s)
        except Exception as error:  # a device error, such as a failed kernel before the copy
            self.fail(flight, error)
            return
        self.settle()

    def fail(self, flight: _InFlightCopy, error: Exception) -> None:
        """End one ticket with the device's error, unless another thread has ended it."""
        with self.lock:
            if flight not in self.queue:
                return
            self.queue.remove(flight)
        flight.ticket.fail(error)

    def finish(self) -> None:
        """Wait for all copies and end their tickets."""
        self.stream.synchronize()
        self.settle()


class DeviceTransfer:
    """A transfer to and from one accelerator, through `torch.accelerator`, `torch.Stream` and
    `torch.Event`. Any thread may call.

    budget_bytes: the limit of all buffers together (None: what the device has).
    reads_in_flight_bytes: how much device memory may wait for its download; beyond that the compute
    stream waits for the oldest download, the CPU does not.
    """

    def __init__(
        self,
        device: torch.device | str,
        budget_bytes: int | None = None,
        reads_in_flight_bytes: int = READS_IN_FLIGHT_BYTES,
        metrics: Metrics | None = None,
    ) -> None:
        self.device = indexed(torch.device(device))
        # Before the first pinned allocation `is_pinned` may return False without a check.
        with torch.accelerator.device_index(self.device.index):  # otherwise on the first device
            torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.metrics = metrics or Metrics()
        self._reads_in_flight_bytes = reads_in_flight_bytes
        self._streams, self._give_back = lend(self, self.device)
        self._up, self._down = self._streams.up, self._streams.down
        self._between_lock = threading.Lock()
        self.memory = DeviceMemory(self.device, self._up, budget_bytes)
        self._upward = _Flights(self._up, TO_DEVICE, self.metrics)
        self._downward = _Flights(self._down, TO_HOST, self.metrics)
        self._lander = _Lander(self.device)
        self._closed = False
        for flights in (self._upward, self._downward):
            weakref.finalize(self, flights.finish)

    # --- to the device ----------------------------------------------------------------------------

    def allocate(self, nbytes: int, what: str = "a block", is_urgent: bool = True) -> DeviceBuffer:
        """Allocate a device buffer, not filled yet. Raises `CapacityError` with the numbers when
        the budget is spent, `DeviceFullError` when the device is. is_urgent: if the device is full,
        first have all `HOLDERS` release idle memory and try again.
        """
        self._check_open()
        self.poll()
        memory = self.memory.allocate(nbytes, what, is_urgent)
        return DeviceBuffer(memory, self._up, self._fill, self._across, what)

    def fetch(self, host: Tensor, what: str = "a block") -> DeviceBuffer:
        """Upload `host` to a new device buffer; `host` is held until the copy is over. Raises as
        `allocate` does.
        """
        buffer = self.allocate(host.nbytes, what)
        buffer.fill(host)
        return buffer

    def _fill(
        self,
        host: Tensor,
        target: Tensor,
        what: str,
        after: list[torch.Event],
        note: Callable[[torch.Event], None],
    ) -> Ticket[None]:
        self._check_open()
        self._check_pair(host, target, what)
        self.poll()
        # The target need not be held: its memory is released in the order of `up`, which runs this.
        return self._upload(host, target, what, after, None, (host,), note)

    def mark(self) -> Mark:
        """Mark the present place of this thread's current stream."""
        stream = torch.accelerator.current_stream(self.device)
        return Mark(stream, stream.record_event())

    def write(
        self, host: Tensor, target: Tensor, after: Mark, what: str = "a copy"
    ) -> Ticket[Tensor]:
        """Copy `host` to the device tensor `target`, once all work before `after` is over. The
        caller must touch neither before the ticket is done; a stream may use `target` after `join`.
        The result is `target`. Never blocks.
        """
        self._check_open()
        self._check_pair(host, target, what)
        self.poll()
        return self._upload(host, target.detach(), what, [after.event], target, (host, target))

    def _upload(
        self,
        host: Tensor,
        target: Tensor,
        what: str,
        after: Iterable[torch.Event],
        result: Tensor | None,
        held: tuple[Tensor, ...],
        note: Callable[[torch.Event], None] = lambda event: None,
    ) -> Ticket[Any]:
        asynchronous = self._is_registered(host)
        flights = self._upward
        with flights.lock:  # the order of the queue is that of the stream
            for event in after:
                self._up.wait_event(event)
            with on(self._up):
                target.copy_(host, non_blocking=asynchronous)
            event, nbytes = self._up.record_event(), host.nbytes
            flight = _InFlightCopy(event, Ticket(what), result, held, nbytes)
            note(flight.event)
            self._follow(flights, flight)
        self.metrics.count("host_to_device_bytes", host.nbytes)
        return flight.ticket

    def join(self) -> None:
        """Let this thread's current stream wait for all uploads so far. Never blocks."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(self._up.record_event())

    # --- between devices --------------------------------------------------------------------------

    def across(self, act: Callable[[], None], after: Iterable[torch.Event]) -> Mark:
        """Call `act`, whose work is queued on the stream between devices, after these events (that
        of a `Mark`, or those of `DeviceBuffer.busy`). Return the place after it. The caller must
        hold the memory that it touches until then. Never blocks.
        """
        return Mark(self._stream_between, self._across(act, after))

    def _across(self, act: Callable[[], None], after: Iterable[torch.Event]) -> torch.Event:
        self._check_open()
        stream = self._stream_between
        with self._between_lock:
            for event in after:
                stream.wait_event(event)
            with on(stream):
                act()
            return stream.record_event()

    @property
    def _stream_between(self) -> torch.Stream:
        with self._between_lock:
            return self._streams.between

    def take_thread(self) -> None:
        """Make the device this thread's current one, for good. Only the engine's own threads call
        it. Otherwise torch would go back to the first device after every call and make a context
        there, which costs hundreds of megabytes for each process of a node with several.
        """
        torch.accelerator.set_device_index(self.device.index)

    def wait_for(self, mark: Mark) -> None:
        """Let this thread's current stream wait for all work before `mark`. Never blocks."""
        torch.accelerator.current_stream(self.device).wait_event(mark.event)

    # --- to the host ------------------------------------------------------------------------------

    def read(
        self, source: Tensor, host: Tensor, what: str = "a copy", after: Mark | None = None
    ) -> Ticket[Tensor]:
        """Download the device tensor `source` to `host`, once all work before `after` is over. The
        result is `host`. `source` must not be written before the ticket is done. Never blocks.

        after: None means now, on this thread's current stream, which must be the one that made
        `source`, as with a gradient in its autograd hook. Only then `source` may be released early:
        it counts against `reads_in_flight_bytes`; otherwise it is held until the copy is over.
        """
        self._check_open()
        self._check_pair(host, source, what)
        self.poll()
        mark = after or self.mark()
        owner = mark.stream if after is None else None
        asynchronous = self._is_registered(host)
        with self._downward.lock:  # the order of the queue is that of the stream
            self._down.wait_event(mark.event)
            ticket = self._download(source.detach(), host, what, owner, asynchronous)
            self._let_go_of_sources()
        self.metrics.count("device_to_host_bytes", host.nbytes)
        return ticket

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return pinned host memory from torch's allocator, outside of every pool, for asynchronous
        copies.
        """
        with torch.accelerator.device_index(self.device.index):
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def _download(
        self,
        source: Tensor,
        host: Tensor,
        what: str,
        owner: torch.Stream | None,
        asynchronous: bool,
    ) -> Ticket[Tensor]:
        """Begin one download. The caller holds the lock of the downward flights."""
        with on(self._down):
            host.detach().copy_(source, non_blocking=asynchronous)
        event = self._down.record_event()
        flight = _InFlightCopy(event, Ticket(what), host, (host,), host.nbytes, source, owner)
        self._follow(self._downward, flight)
        return flight.ticket

    def _let_go_of_sources(self) -> None:
        """Release the oldest sources while more than `reads_in_flight_bytes` of device memory wait
        for their download, each in the order of the stream that owns it: that stream waits for the
        copy before it uses the memory again. The caller holds the lock of the downward flights.
        """
        flights = [f for f in self._downward.queue if f.source is not None and f.owner is not None]
        sizes = {}  # parts of one gradient share their memory
        for flight in flights:
            storage = flight.source.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        for flight in flights:
            if sum(sizes.values()) <= self._reads_in_flight_bytes:
                return
            address = flight.source.untyped_storage().data_ptr()
            flight.owner.wait_event(flight.event)
            flight.source = None
            if not any(f.source is not None and _at(f.source, address) for f in flights):
                del sizes[address]

    # --- copies in flight -------------------------------------------------------------------------

    def _follow(self, flights: _Flights, flight: _InFlightCopy) -> None:
        """Queue the copy, so that its ticket ends when it is over. The caller holds the lock of the
        flights.
        """
        lander = self._lander
        flight.ticket.land = partial(flights.land, flight)
        flight.ticket.urge = lambda: lander.take(partial(flights.land, flight, None))
        flights.queue.append(flight)

    def poll(self) -> None:
        """End the tickets of all copies that are over, which releases what they held. Every call
        that begins a copy does it, too; callers that wait for host memory call it in between. Never
        blocks.
        """
        self._upward.settle()
        self._downward.settle()

    def close(self) -> None:
        """Wait for all copies, end their tickets and return the streams. Idempotent; buffers stay
        valid.
        """
        self._closed = True
        self._upward.finish()
        self._downward.finish()
        self._give_back()

    # --- checks -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"transfer to {self.device}: closed")

    def _check_pair(self, host: Tensor, device: Tensor, what: str) -> None:
        check_copy(host, device, what)
        if device.device != self.device:
            raise ConfigError(f"{what}: expected a tensor on {self.device}, got {device.device}")
        if not host.is_cpu:
            raise ConfigError(f"{what}: expected a tensor in host memory, got {host.device}")

    def _is_registered(self, host: Tensor) -> bool:
        """Return whether `host` is pinned, so that the CPU need not wait for its copy; if it is
        not, note a fallback.
        """
        if not host.numel() or host.is_pinned():
            return True
        self.metrics.fall_back(
            f"copies to and from {self.device.type}",
            "host memory is not registered with the device, so the CPU waits for each copy",
        )
        return False


def _wait_for(event: torch.Event, timeout_s: float | None) -> None:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while deadline_s is not None and not event.query():
        if time.monotonic() >= deadline_s:
            return
        time.sleep(_LOOK_AGAIN_S)
    event.synchronize()  # even if it has passed: this call raises the device's errors


class _Lander:
    """A thread that waits for copies on which chained tickets depend. A caller that waits for one
    copy does so in its own thread. Started when it is first needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: _Landings = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def take(self, land: Callable[[], None]) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                thread = threading.Thread(
                    target=_land_all, args=(self._queue, self._device), daemon=True
                )
                thread.start()
                weakref.finalize(self, self._queue.put, None)
        self._queue.put(land)


def _land_all(landings: _Landings, device: torch.device) -> None:
    torch.accelerator.set_device_index(device.index)  # see DeviceTransfer.take_thread
    while (land := landings.get()) is not None:
        land()
        del land  # it holds the flight's memory


def _at(tensor: Tensor, address: int) -> bool:
    return tensor.untyped_storage().data_ptr() == address
