"""The pipeline of a pass over chunks: it fetches ahead, updates one chunk, writes the last ones.

A fetch is a read from the disk, a download from a device, or both; the way back is a write, an
upload, or both. All of them overlap, in as many buffers and staging buffers as the plan has. Chunks
that are at hand (they and their parameters are in host memory) fill the gaps: they are updated
whenever no fetched chunk has arrived, so that disk, device and cores all stay busy. The last chunks
stay in their buffers unwritten, and are the first of the next pass. One thread runs it, and it
waits only when it has nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from offload.core.locks import check, steadfast
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.staging import Awaited, StagingBuffer, StagingProvider
from offload.optim.tiers import HostChunk, Tiers
from offload.planning.layout import Chunk

# Works on a chunk in memory, with its staging buffer if it has one; returns whether it has changed.
Act = Callable[[HostChunk, StagingBuffer | None], bool]


@dataclass(eq=False)
class _InFlightChunk:
    """A chunk in flight, to its buffer or back."""

    piece: HostChunk
    stays: bool  # it keeps its memory after the work: it is resident, or dirty in its buffer
    staging_buffer: StagingBuffer | None
    disk: Ticket[None] | None

    @property
    def done(self) -> bool:
        disk = self.disk is None or self.disk.done
        return disk and (
            self.staging_buffer is None
            or all(ticket.done for ticket in self.staging_buffer.tickets)
        )


class Pipeline:
    """A pass over some chunks.

    doing: the metric that counts the time of the work on chunks. only_looks: no act changes a
    chunk.
    """

    def __init__(
        self,
        tiers: Tiers,
        staging_buffers: StagingProvider,
        metrics: Metrics,
        doing: str = "update",
        only_looks: bool = False,
    ) -> None:
        self._tiers = tiers
        self._staging_buffers = staging_buffers
        self._metrics = metrics
        self._doing = doing
        self._only_looks = only_looks
        self._coming: deque[_InFlightChunk] = deque()
        self._going: deque[_InFlightChunk] = deque()
        self._reads_left = 0

    def run(self, chunks: Sequence[Chunk], act: Act) -> None:
        """Call `act` once for each chunk. When `run` returns, the changes are in the tiers (in a
        buffer or written), and uploads of parameters may be in flight; if it raises, no chunk is in
        flight any more.
        """
        to_fetch: deque[Chunk] = deque()
        at_hand: deque[Chunk] = deque()
        resident, unwritten = self._tiers.resident, self._tiers.unwritten
        chunks = sorted(chunks, key=lambda chunk: chunk.number not in unwritten)
        for chunk in self._staging_buffers.in_order(chunks, unwritten.keys()):
            is_at_hand = chunk.number in resident and not self._staging_buffers.needs(chunk)
            (at_hand if is_at_hand else to_fetch).append(chunk)
        try:
            self._make_room(to_fetch)
            while to_fetch or at_hand or self._coming:
                check()
                self._fetch_ahead(to_fetch)
                if self._coming and (self._coming[0].done or not at_hand):
                    self._finish_one(act)
                elif at_hand:
                    self._work(act, resident[at_hand.popleft().number], None)
                else:
                    self._settle_oldest()
            while self._going:
                self._settle_oldest()
        except BaseException:
            self._drain()
            raise

    def _make_room(self, to_fetch: Sequence[Chunk]) -> None:
        """Begin to write unwritten chunks whose buffers other chunks need before their own turn,
        until the reads have enough buffers: half of all are enough for them. The unwritten chunks
        at the head of the pass stay in their buffers.
        """
        turns = {chunk.number: turn for turn, chunk in enumerate(to_fetch)}
        unwritten = self._tiers.unwritten
        first = set(takewhile(unwritten.__contains__, turns))
        later = [piece for number, piece in unwritten.items() if number not in first]
        later.sort(key=lambda piece: turns.get(piece.chunk.number, len(turns)))
        stay = self._tiers.plan.buffers // 2
        self._reads_left = sum(map(self._tiers.needs_buffer, to_fetch))
        while later and (len(later) > stay or later[-1].chunk.number not in turns):
            piece = later.pop()  # the one with the last turn, or one that is not in this pass
            if not self._needs_more_buffers:
                return
            flight = _InFlightChunk(piece, True, None, None)
            self._going.append(flight)
            flight.disk = self._tiers.write(piece)
            flight.stays = False
            self._reads_left += piece.chunk.number in turns

    @property
    def _needs_more_buffers(self) -> bool:
        """Whether the reads that are left need more buffers than are free or about to become free
        without another write.
        """
        moving = sum(not flight.stays for flight in self._going)
        return self._reads_left > len(self._tiers.free) + moving

    def _fetch_ahead(self, to_fetch: deque[Chunk]) -> None:
        while self._going and self._going[0].done:
            self._settle_oldest()
        while to_fetch and self._has_room(to_fetch[0]):
            chunk = to_fetch.popleft()
            piece, ticket = self._tiers.resident.get(chunk.number), None
            is_resident = piece is not None
            if piece is None:
                self._reads_left -= self._tiers.needs_buffer(chunk)
                piece, ticket = self._tiers.read(chunk)
            is_staged = self._staging_buffers.needs(chunk)
            staging_buffer = self._staging_buffers.take(chunk) if is_staged else None
            self._coming.append(_InFlightChunk(piece, is_resident, staging_buffer, ticket))

    def _has_room(self, chunk: Chunk) -> bool:
        if self._tiers.needs_buffer(chunk) and not self._tiers.free:
            return False
        is_unwritten = chunk.number in self._tiers.unwritten
        if is_unwritten and any(flight.piece.chunk is chunk for flight in self._going):
            return False  # it is being written
        if not self._staging_buffers.needs(chunk):
            return True
        # Wait for a staging buffer that is in flight elsewhere only when there is nothing to do.
        return self._staging_buffers.has_place(chunk, may_wait=not self._coming)

    def _finish_one(self, act: Act) -> None:
        """Wait for the oldest fetch, work on its chunk, begin its write and upload."""
        flight = self._coming[0]
        number = flight.piece.chunk.number
        self._wait(flight, "disk read")
        changed = self._work(act, flight.piece, flight.staging_buffer)
        if changed and not flight.stays:
            self._tiers.unwritten[number] = flight.piece  # until `give_back`
        must_go = self._needs_more_buffers
        flight.stays |= number in self._tiers.unwritten  # until it is being written
        self._going.append(flight)
        self._coming.popleft()
        if must_go and number in self._tiers.unwritten:
            flight.disk = self._tiers.write(flight.piece)
            flight.stays = False
        if flight.staging_buffer is not None:
            back = self._staging_buffers.send_back if changed else self._staging_buffers.give_back
            back(flight.staging_buffer)
            flight.staging_buffer = None  # its provider looks after it from now on

    def _work(self, act: Act, piece: HostChunk, staging_buffer: StagingBuffer | None) -> bool:
        with self._metrics.span(self._doing, piece.chunk.name):
            if not self._only_looks:
                self._tiers.before_change(piece)
            return act(piece, staging_buffer)

    def _settle_oldest(self) -> None:
        flight = self._going[0]
        self._wait(flight, "disk write")
        self._going.popleft()
        if not flight.stays:
            self._tiers.give_back(flight.piece)

    def _wait(self, flight: _InFlightChunk, cause: str) -> None:
        if flight.disk is not None:
            with self._metrics.span(cause, flight.piece.chunk.name):
                flight.disk.wait()
            flight.disk = None
        if flight.staging_buffer is not None:  # the device transfer counts this time itself
            while flight.staging_buffer.tickets:
                flight.staging_buffer.tickets[-1].wait()
                flight.staging_buffer.tickets.pop()

    @steadfast
    def _drain(self) -> None:
        """Wait, after an error, for all chunks in flight. Their errors are only counted: the first
        one is raised.
        """
        for flight in self._coming:
            self._end(flight)
            flight.stays |= flight.piece.chunk.number in self._tiers.unwritten
            if flight not in self._going:
                self._let_go(flight)
        for flight in self._going:
            is_unwritten = flight.piece.chunk.number in self._tiers.unwritten
            flight.stays |= not self._end(flight) and is_unwritten
            self._let_go(flight)
        self._coming.clear()
        self._going.clear()

    def _end(self, flight: _InFlightChunk) -> bool:
        """Wait for a chunk in flight. Return whether all of its copies succeeded."""
        went_well = True
        under_way: list[Awaited] = [flight.disk] if flight.disk else []
        for ticket in under_way + (flight.staging_buffer.tickets if flight.staging_buffer else []):
            try:
                ticket.wait()
            except Exception:
                self._metrics.count("errors_after_an_error")
                went_well = False
        return went_well

    def _let_go(self, flight: _InFlightChunk) -> None:
        if flight.done:  # a copy that never ended may still write: keep its memory
            if not flight.stays:
                self._tiers.give_back(flight.piece)
            if flight.staging_buffer is not None:
                self._staging_buffers.give_back(flight.staging_buffer)
