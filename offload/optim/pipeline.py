"""Chunks through the update: the next ones are read, one is worked on, the last ones are written.

All three go on at the same time, in as many buffers as the plan has. Chunks that live in host
memory are woven in: they are worked on whenever no chunk from the disk has arrived, so that disk
and cores both stay busy. One thread; it waits only when there is nothing to work on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offload.layout import Chunk
from offload.metrics import Metrics
from offload.optim.tiers import Piece, Tiers
from offload.ticket import Ticket

Act = Callable[[Piece], bool]  # works on a chunk in memory; whether it has changed it


@dataclass(frozen=True)
class _Flight:
    piece: Piece
    ticket: Ticket[None]


class Pipeline:
    """One pass over some chunks."""

    def __init__(self, tiers: Tiers, metrics: Metrics) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._reading: deque[_Flight] = deque()
        self._writing: deque[_Flight] = deque()

    def run(self, chunks: Iterable[Chunk], act: Act) -> None:
        """Call `act` once for each chunk. When it returns, all that was changed is stored; when it
        raises, nothing is under way any more.
        """
        to_read: deque[Chunk] = deque()
        at_hand: deque[Chunk] = deque()
        for chunk in chunks:
            (at_hand if self._tiers.is_resident(chunk) else to_read).append(chunk)
        try:
            while to_read or at_hand or self._reading:
                self._read_ahead(to_read)
                if self._reading and (self._reading[0].ticket.done or not at_hand):
                    self._finish_one(act)
                elif at_hand:
                    self._work(act, self._tiers.resident(at_hand.popleft()))
                else:
                    self._collect_oldest_write()
            while self._writing:
                self._collect_oldest_write()
        except BaseException:
            self._drain()
            raise

    def _read_ahead(self, to_read: deque[Chunk]) -> None:
        while self._writing and self._writing[0].ticket.done:
            self._collect_oldest_write()
        while to_read and self._tiers.free_buffers:
            self._reading.append(_Flight(*self._tiers.read(to_read.popleft())))

    def _finish_one(self, act: Act) -> None:
        """Wait for the oldest read, work on it, start to write it."""
        flight = self._reading[0]
        with self._metrics.span("disk read"):
            flight.ticket.wait()
        self._reading.popleft()
        if self._work(act, flight.piece):
            self._writing.append(_Flight(flight.piece, self._tiers.write(flight.piece)))
        else:
            self._tiers.give_back(flight.piece)

    def _work(self, act: Act, piece: Piece) -> bool:
        with self._metrics.span("update"):
            return act(piece)

    def _collect_oldest_write(self) -> None:
        flight = self._writing[0]
        with self._metrics.span("disk write"):
            flight.ticket.wait()
        self._writing.popleft()
        self._tiers.give_back(flight.piece)

    def _drain(self) -> None:
        """After an error: wait for the rest, whose errors are not more important than that one."""
        for flight in (*self._reading, *self._writing):
            try:
                flight.ticket.wait()
            except Exception:
                self._metrics.count("errors_after_an_error")
        self._reading.clear()
        self._writing.clear()
