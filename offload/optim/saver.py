"""A snapshot of the optimizer state, saved while training goes on.

Every chunk that holds state is written once, by the first thread that reaches it: the one in `run`,
which works through all chunks in a background thread or in the caller's, or a step that is about to
change the chunk. So there is no second copy of the state, in memory or on disk. A chunk in host
memory does not change while it is written. A chunk on disk is read into memory of the saver's own,
at most `READS` times the largest chunk, outside of the budget; the store is copy on write, so the
generation that is being read stays, however often the chunk is written meanwhile.

An error ends the saving, not the training: `run` raises it, and nothing else does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum

import torch
from torch import Tensor

from offload.core.locks import Gate, steadfast, uninterrupted
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.consistency import clear_frames
from offload.optim.recipe import Record
from offload.optim.tiers import HostChunk, Tiers
from offload.planning.layout import ELEMENT_BYTES, Chunk, Slice

READS = 2  # one is read while the other is written
_PAGE_BYTES = 4096
_CAUSE = "checkpoint"
_WHAT = "save of the optimizer's state"

# Takes some values of a parameter's field: the parameter's number, the field, the byte offset of
# the first value, the flat values. They are in the order of the parameter's memory, and may change
# as soon as the call has returned. Any thread may call it.
Sink = Callable[[int, str, int, Tensor], None]


class ChunkSnapshot(Enum):
    """The state of one chunk in a snapshot."""

    WAITING = "waiting"  # not saved yet
    HELD = "held"  # is being written from the tiers' memory, and must not change
    READ = "read"  # is being read from disk, or written from that copy; it may change
    SAVED = "saved"


MOVES = {
    ChunkSnapshot.WAITING: {ChunkSnapshot.HELD, ChunkSnapshot.READ},
    ChunkSnapshot.HELD: {ChunkSnapshot.SAVED},
    ChunkSnapshot.READ: {ChunkSnapshot.SAVED},
    ChunkSnapshot.SAVED: set(),
}


# A read in flight of a disk chunk into the saver's memory.
SnapshotRead = tuple[HostChunk, Ticket[None]]


class Saver:
    """The saver of one snapshot. It is made between steps and observes the tiers until all chunks
    are saved or it is given up.
    """

    def __init__(
        self, tiers: Tiers, records: Sequence[Record], metrics: Metrics, sink: Sink
    ) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._sink = sink
        self._parts: dict[int, list[Slice]] = {}
        self._states: dict[int, ChunkSnapshot] = {}
        self._held = 0  # how many chunks are HELD
        # The chunks in host memory: resident ones, and those in a buffer until it is needed.
        self._here: dict[int, HostChunk] = dict(tiers.unwritten)
        # The waiting chunks, in memory and on disk.
        self._waiting_here: dict[int, Chunk] = {}
        self._waiting_on_disk: dict[int, Chunk] = {}
        self._buffer_bytes = 0  # of the largest chunk that is on disk, or may be later
        for chunk in tiers.plan.chunks:
            parts = [part for part in chunk.slices if records[part.param].has_state]
            if chunk.fields and parts:
                self._expect(chunk, parts)
        self._lock = threading.RLock()
        self._gate = Gate(self._lock)
        self.progress = 0  # state changes so far
        self._error: BaseException | None = None
        self._is_over = False
        tiers.watcher = self

    def _expect(self, chunk: Chunk, parts: list[Slice]) -> None:
        number = chunk.number
        self._parts[number], self._states[number] = parts, ChunkSnapshot.WAITING
        if number in self._tiers.resident:
            self._here[number] = self._tiers.resident[number]
        else:
            self._buffer_bytes = max(self._buffer_bytes, chunk.nbytes)
        waiting = self._waiting_here if number in self._here else self._waiting_on_disk
        waiting[number] = chunk

    # --- the thread that saves --------------------------------------------------------------------

    @uninterrupted
    def run(self) -> None:
        """Save all chunks that are left; return when the sink has all of them. No memory of the
        tiers is held then.
        """
        reading: deque[SnapshotRead] = deque()
        try:
            self._work_through(reading)
        except BaseException as error:
            self.cancel(error)
        with steadfast:
            for _, ticket in reading:  # no read may write to the memory after it is freed
                with suppress(Exception):
                    ticket.wait()
            self._end()
        if self._error is not None:
            raise self._error

    def _work_through(self, reading: deque[SnapshotRead]) -> None:
        memory: list[Tensor] = []
        while not self._is_ended(reading):
            self._read_ahead(reading, memory)
            here = None if reading and reading[0][1].done else self._hold_next()
            if here is not None:
                self._write_held(here)
            elif reading:
                self._write_oldest(reading, memory)

    def _is_ended(self, reading: deque[SnapshotRead]) -> bool:
        with self._lock:
            if self._error is not None:
                return True
            if not (reading or self._waiting_here or self._waiting_on_disk):
                self._wait_until(lambda: not self._held)  # by a step that saves the last one
                return True
            return False

    def _read_ahead(self, reading: deque[SnapshotRead], memory: list[Tensor]) -> None:
        while len(reading) < READS:
            with self._lock:  # no other generation is written before the read begins
                chunk = next(iter(self._waiting_on_disk.values()), None)
                if chunk is None:
                    return
                whole = memory.pop() if memory else self._make_memory()
                piece = HostChunk(chunk, whole[: chunk.nbytes // ELEMENT_BYTES], whole)
                reading.append((piece, self._tiers.copy_into(piece.memory, chunk)))
                self._move(chunk.number, ChunkSnapshot.READ)

    def _make_memory(self) -> Tensor:
        whole = torch.empty(self._buffer_bytes + _PAGE_BYTES, dtype=torch.uint8, device="cpu")
        begin = -whole.data_ptr() % _PAGE_BYTES  # direct I/O needs page alignment
        return whole[begin : begin + self._buffer_bytes].view(torch.float32)

    def _hold_next(self) -> HostChunk | None:
        with self._lock:
            number = next(iter(self._waiting_here), None)
            if number is None:
                return None
            self._move(number, ChunkSnapshot.HELD)
            return self._here[number]

    def _write_oldest(self, reading: deque[SnapshotRead], memory: list[Tensor]) -> None:
        piece, ticket = reading[0]
        ticket.wait()
        self._write(piece)
        reading.popleft()
        memory.append(piece.whole)
        with self._lock:
            self._move(piece.chunk.number, ChunkSnapshot.SAVED)

    # --- the thread that steps --------------------------------------------------------------------

    @uninterrupted
    def before_change(self, piece: HostChunk) -> None:
        """Save the chunk from the piece if it still waits; block while another thread is writing
        it.
        """
        number = piece.chunk.number
        with self._lock:
            if (
                self._states.get(number, ChunkSnapshot.SAVED) is ChunkSnapshot.SAVED
                or self._error is not None
            ):
                return
            is_mine = self._states[number] is ChunkSnapshot.WAITING
            if is_mine:
                self._move(number, ChunkSnapshot.HELD)
        with self._metrics.span(_CAUSE, piece.chunk.name):
            if is_mine:
                self._save_for_a_step(piece)
            else:
                self._await(number)

    @steadfast  # Ctrl-C ends the step, not the save, which has half of the chunk
    def _save_for_a_step(self, piece: HostChunk) -> None:
        try:
            self._write_held(piece)
        except Exception as error:  # the step goes on; `run` raises it
            self.cancel(error.with_traceback(None))  # a traceback would hold the piece
        except BaseException as error:
            self.cancel(error)
            raise

    def before_release(self, piece: HostChunk) -> None:
        """Note that the chunk's bytes will be on disk only. Block while they are being written from
        memory.
        """
        number = piece.chunk.number
        with self._lock:
            self._wait_until(lambda: self._states.get(number) is not ChunkSnapshot.HELD)
            self._here.pop(number, None)
            if number in self._waiting_here:
                self._waiting_on_disk[number] = self._waiting_here.pop(number)

    def _await(self, number: int) -> None:
        with self._lock:
            self._wait(lambda: self._states[number] is not ChunkSnapshot.HELD)

    def settle(self) -> None:
        """Wait until the saver needs nothing of the tiers any more."""
        with self._lock:
            self._wait(lambda: self._is_over)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so` is true or the saving is given up. The caller holds the lock."""
        self._wait(lambda: is_so() or self._error is not None)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        self._gate.wait_until(is_so, _WHAT, progress=lambda: self.progress)

    # --- both -------------------------------------------------------------------------------------

    def _write_held(self, piece: HostChunk) -> None:
        try:
            self._write(piece)
        finally:  # saved or failed, it may change now
            with self._lock:
                self._move(piece.chunk.number, ChunkSnapshot.SAVED)

    def _write(self, piece: HostChunk) -> None:
        for part in self._parts[piece.chunk.number]:
            for field, values in piece.fields(part).items():
                self._sink(part.param, field, part.begin * ELEMENT_BYTES, values)

    def _move(self, number: int, state: ChunkSnapshot) -> None:
        before = self._states[number]
        assert state in MOVES[before], (number, before, state)
        self._states[number] = state
        self.progress += 1
        self._waiting_here.pop(number, None)
        self._waiting_on_disk.pop(number, None)
        self._held += (state is ChunkSnapshot.HELD) - (before is ChunkSnapshot.HELD)
        self._gate.notify_all()

    def cancel(self, error: BaseException) -> None:
        """Make `run`, under way or still to come, end with `error`. Any thread may call it."""
        with self._lock:
            self._error = self._error or error
            self._gate.notify_all()

    @steadfast
    def give_up(self, error: BaseException) -> None:
        """End the saving with `error`, where `run` will not be called."""
        self.cancel(error)
        self._end()

    def _end(self) -> None:
        clear_frames(self._error)  # a caller that keeps the error would keep the saver's memory
        with self._lock:
            if self._is_over:
                return
            if self._tiers.watcher is self:
                self._tiers.watcher = None
            self._here.clear()  # it is the tiers' memory
            self._tiers = None  # type: ignore[assignment]
            self._is_over = True
            self._gate.notify_all()
