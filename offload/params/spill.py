"""Gradients that host memory has no room for: spilled to the store, with checksums like all of it.

A gradient is cut into the ranges that the update will read, each a chunk of the store. A gradient
from autograd is copied to a slot of the staging buffer and written from there while backward goes
on; backward waits only when all slots are being written. To accumulate, a range is read into a
slot, added to there and written again, as a new generation. Elementwise edits are recorded and
made when a range is next in memory, in the order in which torch would have made them.

A write that fails makes its gradient useless: the next call here raises its error, at the latest
before the update, and so does every later use of the values. Any thread may call; a lock lets in
one at a time.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count, pairwise
from typing import Protocol

import torch
from torch import Tensor

from offload.core.errors import OffloadError, StateError, StoreTimeout
from offload.core.locks import uninterrupted
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.gradient_handle import GradientHandle
from offload.optim.gradient_source import GradientSource
from offload.planning.layout import Chunk, round_up
from offload.storage.disk import DiskStore
from offload.storage.handout import Outgoing

_WRITING = "gradient write"  # name of the wait in metrics
_PAGE = 4096
LINE = 64  # a cache line: slices of a chunk begin at one in their slot


@dataclass(eq=False)
class SpillSlot:
    """A slot of the staging buffer, for one range or for the slices of one chunk of state."""

    memory: Tensor  # bytes
    tickets: list[Ticket[None]] = field(default_factory=list)  # transfers that may touch it
    is_lost: bool = False  # after a timeout the operating system may still write to it
    is_staged: bool = False  # the update or an accumulation uses it
    is_written: bool = False  # a write from it has not been taken in


class Losable(Protocol):
    """A gradient whose writes may fail. error: that of the last one that did."""

    error: OffloadError | None


@dataclass(eq=False)
class SpilledRange:
    """A range of elements [begin, end) of a gradient. made: how many of the recorded edits the
    stored values have; writing: the write in flight.
    """

    begin: int
    end: int
    key: str
    made: int = 0
    writing: _Writing | None = None


@dataclass(eq=False)
class _Writing:
    piece: SpilledRange
    slot: SpillSlot
    ticket: Ticket[None]
    whose: weakref.ref[Losable]


class SpillArea:
    """A staging buffer, and room in a store, for the spilled gradients of one model. memory: the
    staging buffer, which slots divide into whole pages. room_bytes: the limit of what all gradients
    take of the store. params: those whose whole gradients are spilled.
    """

    def __init__(
        self,
        store: DiskStore,
        memory: Tensor,
        room_bytes: int,
        metrics: Metrics,
        params: frozenset[Tensor] = frozenset(),
    ) -> None:
        self.store, self.metrics = store, metrics
        # By id: a parameter holds its gradient, which refers to this area, in a way that Python's
        # garbage collection cannot see.
        self._ids = frozenset(map(id, params))
        self.lock = threading.RLock()
        self.wants_norms = False  # the user's code has asked for a norm
        self.wants_squares = False  # the update has asked for sums of squares
        self._memory = memory
        self._lost: list[Tensor] = []  # memory that the operating system may write to at any time
        self.slots: list[SpillSlot] = []
        self.slot_bytes = 0  # of each
        self._left_bytes = room_bytes
        self._numbers = count()
        self._writing: deque[_Writing] = deque()
        self.given_up: deque[tuple[list[str], int]] = deque()  # filled by finalizers
        self._living: weakref.WeakSet[GradientHandle] = weakref.WeakSet()
        self._cut_of: dict[object, tuple[int, ...]] = {}
        if memory.nbytes:
            self.divide(_PAGE)

    def takes(self, param: Tensor) -> bool:
        """Return whether the gradients of this parameter are spilled here."""
        return id(param) in self._ids

    # --- slots ------------------------------------------------------------------------------------

    def divide(self, slot_bytes: int) -> None:
        """Divide the staging buffer into slots of `slot_bytes`, or into one if it is smaller.
        Waits for writes; no slot may be in use but those of transfers that timed out.
        """
        with self.lock:
            self.settle()
            whole = self._memory.nbytes
            self.slot_bytes = size = min(round_up(max(slot_bytes, 1), _PAGE), whole)
            begins = range(0, whole - size + 1, size)
            self.slots = [SpillSlot(self._memory[begin : begin + size]) for begin in begins]
            for slot in self.slots:
                slot.is_lost = any(_overlap(slot.memory, lost) for lost in self._lost)

    def has_free(self) -> bool:
        """Return whether `take` would not wait: a slot is free, or none will ever become free and
        `take` raises.
        """
        with self.lock:
            self.poll()
            is_to_come = self._writing or any(slot.is_staged for slot in self.slots)
            return self._free_slot() is not None or not is_to_come

    def take(self) -> SpillSlot:
        """Find a free slot, which is taken as soon as a transfer or the update uses it. Waits for
        the oldest write while there is none; raises `StateError` if there is none to wait for.
        """
        with self.lock:
            self.poll()
            while (slot := self._free_slot()) is None and self._writing:
                self._end_oldest()
            if slot is None:
                raise StateError("gradients: no staging memory is free, and no write is in flight")
            slot.tickets.clear()
            return slot

    def _free_slot(self) -> SpillSlot | None:
        for slot in self.slots:
            is_taken = slot.is_lost or slot.is_staged or slot.is_written
            if not is_taken and all(ticket.done for ticket in slot.tickets):
                return slot
        if self._lost and not self.store.engine.abandoned_bytes:  # the drive has answered after all
            self._lost.clear()
            for slot in self.slots:
                slot.is_lost = False
            return self._free_slot()
        return None

    def lose_after(self, slot: SpillSlot, error: OffloadError) -> None:
        """Mark a slot as lost if its transfer ended with a timeout: the operating system may still
        touch the memory.
        """
        if isinstance(error, StoreTimeout) and error.errno == errno.ETIMEDOUT:
            slot.is_lost = True
            self._lost.append(slot.memory)

    # --- writes in flight -------------------------------------------------------------------------

    @uninterrupted
    def write(self, whose: Losable, piece: SpilledRange, values: Tensor, slot: SpillSlot) -> None:
        """Begin to write a range from its slot. The slot is free again when the write has ended."""
        with self.lock:
            ticket = self.store.write(piece.key, values)
            slot.tickets.append(ticket)
            slot.is_written = True
            writing = _Writing(piece, slot, ticket, weakref.ref(whose))
            piece.writing = writing
            self._writing.append(writing)
            self.metrics.count("spilled_bytes", values.nbytes)

    def poll(self) -> None:
        """Raise the error of a failed write, if any. Does not wait for writes in flight."""
        with self.lock:
            while self._writing and self._writing[0].ticket.done:
                self._end_oldest()

    def settle(self, piece: SpilledRange | None = None) -> None:
        """Wait until all writes have ended, or that of one range; raise the error of one that
        failed.
        """
        with self.lock:
            while self._writing if piece is None else piece.writing:
                self._end_oldest()

    def _end_oldest(self, raises: bool = True) -> None:
        """Wait for the oldest write. If it fails, wait for the others as well, so that each
        gradient that has lost values has its error when this one is raised.
        """
        writing, failure = self._writing[0], None
        try:
            with self.metrics.span(_WRITING):
                writing.ticket.wait()
        except OffloadError as error:
            self.lose_after(writing.slot, error)
            failure = error
        self._writing.popleft()
        if writing.piece.writing is writing:
            writing.piece.writing = None
        writing.slot.is_written = False
        if failure is None:
            return
        whose = writing.whose()
        if whose is None:
            self.metrics.count("errors_after_an_error")  # the gradient has been freed
            return
        whose.error = failure
        if raises:
            while self._writing:
                self._end_oldest(raises=False)
            raise failure

    # --- gradients --------------------------------------------------------------------------------

    def cut(self, key: object, numel: int, starts_and_ends: Iterable[int]) -> None:
        """Set the elements at which the gradients of `key` are cut from now on."""
        self._cut_of[key] = tuple(sorted({0, numel, *starts_and_ends}))

    def cut_for(self, slices: Mapping[Tensor, Sequence[tuple[int, int]]]) -> None:
        """Cut the gradients of these parameters at the bounds by which the update will read them,
        from now on.
        """
        for param, each in slices.items():
            self.cut(id(param), param.numel(), chain(*each))

    def reserve(
        self, key: object, numel: int, dtype: torch.dtype
    ) -> tuple[int, list[int], int] | None:
        """Reserve room for a gradient; return a number for it, where it is cut, and its bytes.
        None: there is no room, since gradients that the user's code still holds have it.
        """
        with self.lock:
            while self.given_up:  # by gradients that were garbage-collected since
                keys, freed_bytes = self.given_up.popleft()
                self._left_bytes += freed_bytes
                for one in keys:
                    with suppress(StateError):  # never written, or the store is closed
                        self.store.free(one)
            cuts = self.fitting(self._cut_of.get(key, (0, numel)), dtype)
            each = ((end - begin) * dtype.itemsize for begin, end in pairwise(cuts))
            nbytes = sum(round_up(one, _PAGE) for one in each)
            if nbytes > self._left_bytes:
                return None
            self._left_bytes -= nbytes
            return next(self._numbers), cuts, nbytes

    def fitting(self, cuts: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the cuts, with more of them where a range would be larger than a slot."""
        most = max(1, self.slot_bytes // dtype.itemsize)
        inner = [at for begin, end in pairwise(cuts) for at in range(begin, end, most)]
        return [*inner, cuts[-1]]

    def show(self, param: Tensor, spilled: GradientSource) -> GradientHandle:
        """Make the handle by which torch and the user's code see the gradient."""
        gradient = GradientHandle.of(param, spilled)
        self._living.add(gradient)
        return gradient

    def close(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Move the gradients that the user's code still holds out of the store, before that is
        closed, to places that `make` returns. Logs each gradient that is lost. Idempotent.
        """
        with self.lock:
            while self._writing:
                self._end_oldest(raises=False)
            living = list(self._living)
            places: dict[int, Outgoing] = {}
            for number, gradient in enumerate(living):  # all places first, for one file for all
                if gradient.here is None:
                    with _loss_told():
                        like = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta")
                        places[number] = make(like)
            for number, gradient in enumerate(living):
                if gradient.here is not None or number in places:
                    with _loss_told():
                        gradient.keep_in(lambda v, at=number: _kept(places[at], v))  # type: ignore[misc]
            self._living.clear()
            self.slots, self.slot_bytes = [], 0
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._lost.clear()


@contextmanager
def _loss_told() -> Iterator[None]:
    try:
        yield
    except OffloadError as error:
        LOG.error("close(): a gradient is lost: %s", error)


def _kept(place: Outgoing, values: Tensor) -> Tensor:
    place.fill(values)
    place.sync()
    return place.tensor


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def slot_bytes(chunks: Iterable[Chunk], itemsizes: Mapping[int, int]) -> int:
    """Return the bytes of a slot that holds the spilled slices of any one chunk. itemsizes: bytes
    per element of the spilled gradients, by the number of their parameter.
    """
    each = (
        sum(
            round_up((part.end - part.begin) * itemsizes[part.param], LINE)
            for part in chunk.slices
            if part.param in itemsizes
        )
        for chunk in chunks
    )
    return max(each, default=0)
