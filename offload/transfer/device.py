"""Copies to and from one accelerator, on two streams of their own."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError, StateError
from offload.metrics import Metrics
from offload.ticket import Ticket
from offload.transfer.buffer import DeviceBuffer, DeviceMemory
from offload.transfer.checks import check_copy, cut, indexed

READS_IN_FLIGHT_BYTES = 256 << 20


@dataclass(frozen=True)
class Mark:
    """A place on a stream: everything that was given to the stream before."""

    stream: torch.Stream
    event: torch.Event


@dataclass
class _Flight:
    """One copy under way, and what must stay where it is until the copy is over."""

    event: torch.Event
    ticket: Ticket[Any]
    result: Tensor | None
    held: tuple[Tensor, ...]


@dataclass
class _Reading(_Flight):
    """A copy to the host. `source` is memory of the allocator's pool of `owner`."""

    source: Tensor | None
    owner: torch.Stream


class DeviceTransfer:
    """Copies to and from one accelerator, through `torch.accelerator`, `torch.Stream` and
    `torch.Event`.

    budget_bytes: what all buffers may hold together (None: what the device has).
    reads_in_flight_bytes: how much device memory may wait for its copy to the host; beyond that
    the stream that computes waits for the oldest copy, the CPU does not.
    """

    zero_copy = False

    def __init__(
        self,
        device: torch.device | str,
        budget_bytes: int | None = None,
        reads_in_flight_bytes: int = READS_IN_FLIGHT_BYTES,
        metrics: Metrics | None = None,
    ) -> None:
        self.device = indexed(torch.device(device))
        torch.empty(1, pin_memory=True)  # before, `is_pinned` may say no without having looked
        self.metrics = metrics or Metrics()
        self._reads_in_flight_bytes = reads_in_flight_bytes
        self._up = torch.Stream(self.device)
        self._down = torch.Stream(self.device)
        self.memory = DeviceMemory(self.device, self._up, budget_bytes)
        self._lock = threading.Lock()
        self._upward: deque[_Flight] = deque()  # in the order of the stream
        self._downward: deque[_Reading] = deque()
        self._closed = False

    # --- to the device ----------------------------------------------------------------------------

    def allocate(self, nbytes: int, what: str = "a block") -> DeviceBuffer:
        """Device memory to be filled. Raises `CapacityError` with the numbers when the budget or
        the device is spent. Never blocks.
        """
        self._check_open()
        return DeviceBuffer(self.memory.allocate(nbytes, what), self._up, self._fill, what)

    def fetch(self, host: Tensor, what: str = "a block") -> DeviceBuffer:
        """A device buffer with the bytes of `host`, which is held until they are there."""
        buffer = self.allocate(host.nbytes, what)
        buffer.fill(host)
        return buffer

    def _fill(self, host: Tensor, target: Tensor, what: str) -> Ticket[None]:
        self._check_open()
        self._check_pair(host, target, what)
        self._settle(self._upward)
        # The target is not held: its memory is given back in the order of `up`, as this copy runs.
        return self._lift(host, target, what, None, (host,))

    def mark(self) -> Mark:
        """The present place of this thread's current stream."""
        stream = torch.accelerator.current_stream(self.device)
        return Mark(stream, stream.record_event())

    def write(
        self, host: Tensor, target: Tensor, after: Mark, what: str = "a copy"
    ) -> Ticket[Tensor]:
        """Copy `host` onto the device tensor `target`, once everything before `after` is done with
        it. Neither may be touched before the ticket is done; a stream may use `target` after
        `join`. The result is `target`. Never blocks.
        """
        self._check_open()
        self._check_pair(host, target, what)
        self._settle(self._upward)
        self._up.wait_event(after.event)
        return self._lift(host, target, what, target, (host, target))

    def _lift(
        self,
        host: Tensor,
        target: Tensor,
        what: str,
        result: Tensor | None,
        held: tuple[Tensor, ...],
    ) -> Ticket[Any]:
        asynchronous = self._is_registered(host)
        with self._up:
            target.copy_(host, non_blocking=asynchronous)
        self.metrics.count("host_to_device_bytes", host.nbytes)
        flight = _Flight(self._up.record_event(), Ticket(what), result, held)
        return self._follow(self._upward, flight)

    def join(self) -> None:
        """Let this thread's current stream wait for all copies to the device so far."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(self._up.record_event())

    # --- to the host ------------------------------------------------------------------------------

    def read(
        self, source: Tensor, host: Tensor, what: str = "a copy", after: Mark | None = None
    ) -> Ticket[Tensor]:
        """Copy the device tensor `source` to `host`, once everything before `after` (None: now, on
        this thread's current stream) is done. `source` may be dropped at once, but not written
        before the ticket is done. The result is `host`. Never blocks.
        """
        return self._read(source, host, what, after, [(source.detach(), host)])[0]

    def read_in_parts(
        self,
        source: Tensor,
        host: Tensor,
        part_bytes: int,
        what: str = "a copy",
        after: Mark | None = None,
    ) -> list[Ticket[Tensor]]:
        """As `read`, with a ticket for every `part_bytes`, in order: the first part can be worked
        on while the next is under way. Each result is a part of `host`, flat.
        """
        check_copy(host, source, what)
        flat, target = source.detach().view(-1), host.view(-1)
        parts = cut(source.numel(), part_bytes // source.element_size())
        return self._read(source, host, what, after, [(flat[p], target[p]) for p in parts])

    def _read(
        self,
        source: Tensor,
        host: Tensor,
        what: str,
        after: Mark | None,
        pairs: list[tuple[Tensor, Tensor]],
    ) -> list[Ticket[Tensor]]:
        self._check_open()
        self._check_pair(host, source, what)
        self._settle(self._downward)
        mark = after or self.mark()
        self._down.wait_event(mark.event)
        tickets = [self._lower(*pair, mark.stream, what) for pair in pairs]
        self._let_go_of_sources()
        return tickets

    def _lower(
        self, source: Tensor, host: Tensor, owner: torch.Stream, what: str
    ) -> Ticket[Tensor]:
        asynchronous = self._is_registered(host)
        with self._down:
            host.copy_(source, non_blocking=asynchronous)
        self.metrics.count("device_to_host_bytes", host.nbytes)
        event = self._down.record_event()
        return self._follow(
            self._downward, _Reading(event, Ticket(what), host, (host,), source, owner)
        )

    def _let_go_of_sources(self) -> None:
        """Where too much device memory waits for its copy to the host, drop the oldest in the order
        of the stream that owns it: that stream waits for the copy before it uses the memory again.
        """
        with self._lock:
            held_bytes = sum(f.source.nbytes for f in self._downward if f.source is not None)
            for flight in self._downward:
                if held_bytes <= self._reads_in_flight_bytes:
                    return
                if flight.source is not None:
                    flight.owner.wait_event(flight.event)
                    held_bytes -= flight.source.nbytes
                    flight.source = None

    # --- what is under way ------------------------------------------------------------------------

    def _follow(self, flights: deque[Any], flight: _Flight) -> Ticket[Any]:
        """Have the flight's ticket end when the flight is over."""
        ticket = flight.ticket
        ticket.urge = lambda: self._land(flights, flight)
        with self._lock:
            flights.append(flight)
        return ticket

    def _land(self, flights: deque[Any], flight: _Flight) -> None:
        """Wait for one flight, in the thread that wants its result."""
        try:
            with self.metrics.span("device copy"):
                flight.event.synchronize()
        except Exception as error:  # the device's: a kernel before the copy has failed, say
            with self._lock:
                flights.remove(flight)
            flight.ticket.fail(error)
            return
        self._settle(flights)

    def _settle(self, flights: deque[Any]) -> None:
        """End the tickets of the copies that are over. Never blocks."""
        while True:
            with self._lock:
                if not flights or not flights[0].event.query():
                    return
                flight = flights.popleft()
            flight.ticket.finish(flight.result)

    def close(self) -> None:
        """Wait for all copies and end their tickets. Idempotent; buffers stay valid."""
        self._closed = True
        self._up.synchronize()
        self._down.synchronize()
        self._settle(self._upward)
        self._settle(self._downward)

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
        """Whether the CPU can go on while `host` is copied; where it cannot, that is told."""
        if not host.numel() or host.is_pinned():
            return True
        self.metrics.fall_back(
            f"copies to and from {self.device.type}",
            "host memory is not registered with the device, so the CPU waits for each copy",
        )
        return False
