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

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Protocol

import torch
from torch import Tensor

from offload.core.errors import OffloadError, StateError
from offload.core.locks import uninterrupted
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.gradient_handle import GradientHandle
from offload.optim.gradient_source import GradientSource
from offload.params.spill_slots import SpillSlot, SpillSlots, page_up
from offload.storage.disk import DiskStore
from offload.storage.outgoing import Outgoing

_WRITING = "gradient write"  # name of the wait in metrics


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
    take of the store.
    """

    def __init__(
        self,
        store: DiskStore,
        memory: Tensor,
        room_bytes: int,
        metrics: Metrics,
    ) -> None:
        self.store, self.metrics = store, metrics
        self.lock = threading.RLock()
        self.wants_norms = False  # the user's code has asked for a norm
        self.wants_squares = False  # the update has asked for sums of squares
        self.slots = SpillSlots(memory)
        self._left_bytes = room_bytes
        self._numbers = count()
        self._writing: deque[_Writing] = deque()
        self.given_up: deque[tuple[list[str], int]] = deque()  # filled by finalizers
        self._living: weakref.WeakSet[GradientHandle] = weakref.WeakSet()
        self._cut_of: dict[object, tuple[int, ...]] = {}

    # --- slots ------------------------------------------------------------------------------------

    def divide(self, slot_bytes: int) -> None:
        """Divide the staging buffer into slots of `slot_bytes`, or into one if it is smaller.
        Waits for writes; no slot may be in use but those of transfers that timed out.
        """
        with self.lock:
            self.settle()
            self.slots.divide(slot_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.slots.slot_bytes

    def has_free(self) -> bool:
        """Return whether `take` would not wait: a slot is free, or none will ever become free and
        `take` raises.
        """
        with self.lock:
            self._end_what_is_done()
            is_to_come = self._writing or self.slots.are_staged
            return self._free_slot() is not None or not is_to_come

    def take(self) -> SpillSlot:
        """Find a free slot, which is taken as soon as a transfer or the update uses it. Waits for
        the oldest write while there is none; raises `StateError` if there is none to wait for.
        """
        with self.lock:
            self._end_what_is_done()
            while self._writing and self.slots.free() is None:
                self._end_oldest()
            slot = self._free_slot()
            if slot is None:
                raise StateError("gradients: no staging memory is free, and no write is in flight")
            return slot

    def _free_slot(self) -> SpillSlot | None:
        found = self.slots.free()
        if found is None and not self._is_waited_for():
            self.slots.recover()
            found = self.slots.free()
        return found

    def _is_waited_for(self) -> bool:
        """Return whether the operating system still runs a transfer that timed out."""
        return self.store.engine.abandoned_bytes > 0

    # --- writes in flight -------------------------------------------------------------------------

    @uninterrupted
    def write(self, whose: Losable, piece: SpilledRange, values: Tensor, slot: SpillSlot) -> None:
        """Begin to write a range from its slot. The slot is free again when the write has ended."""
        with self.lock:
            ticket = slot.start(self.store.write(piece.key, values))
            slot.is_written = True
            writing = _Writing(piece, slot, ticket, weakref.ref(whose))
            piece.writing = writing
            self._writing.append(writing)
            self.metrics.count("spilled_bytes", values.nbytes)

    def poll(self) -> None:
        """Raise the error of a failed write, if any. Does not wait for writes in flight."""
        with self.lock:
            self._end_what_is_done()

    def settle(self) -> None:
        """Wait until all writes have ended; raise the error of one that failed."""
        with self.lock:
            while self._writing:
                self._end_oldest()

    def finish(self, piece: SpilledRange) -> None:
        """Wait until no write of this range is in flight."""
        with self.lock:
            while piece.writing is not None:
                self._end_oldest()

    def _end_what_is_done(self) -> None:
        while self._writing and self._writing[0].ticket.done:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Wait for the oldest write. If it fails, wait for the others as well, so that each
        gradient that has lost values has its error when this one is raised.
        """
        error = self._ended()
        if error is not None:
            while self._writing:
                self._ended()
            raise error

    def _ended(self) -> OffloadError | None:
        """Wait for the oldest write; return the error that the caller must raise, if any."""
        writing = self._writing[0]
        try:
            with self.metrics.span(_WRITING):
                writing.ticket.wait()
        except OffloadError as error:
            self.slots.lose_after(writing.slot, error)
            self._end(writing)
            whose = writing.whose()
            if whose is not None:
                whose.error = error
                return error
            self.metrics.count("errors_after_an_error")  # the gradient has been freed
        else:
            self._end(writing)
        return None

    def _end(self, writing: _Writing) -> None:
        self._writing.popleft()
        if writing.piece.writing is writing:
            writing.piece.writing = None
        writing.slot.is_written = False

    # --- gradients --------------------------------------------------------------------------------

    def cut(self, key: object, numel: int, starts_and_ends: Iterable[int]) -> None:
        """Set the elements at which the gradients of `key` are cut from now on."""
        self._cut_of[key] = tuple(sorted({0, numel, *starts_and_ends}))

    def reserve(
        self, key: object, numel: int, dtype: torch.dtype
    ) -> tuple[int, list[int], int] | None:
        """Reserve room for a gradient; return a number for it, where it is cut, and its bytes.
        None: there is no room, since gradients that the user's code still holds have it.
        """
        with self.lock:
            self._take_in()
            cuts = self.fitting(self._cut_of.get(key, (0, numel)), dtype)
            nbytes = sum(page_up((end - begin) * dtype.itemsize) for begin, end in pairwise(cuts))
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

    def _take_in(self) -> None:
        """Free the chunks of gradients that were garbage-collected since."""
        while self.given_up:
            keys, nbytes = self.given_up.popleft()
            self._left_bytes += nbytes
            for key in keys:
                with suppress(StateError):  # never written, or the store is closed
                    self.store.free(key)

    def close(self, make: Callable[[Tensor], Outgoing]) -> None:
        """Move the gradients that the user's code still holds out of the store, before that is
        closed, to places that `make` returns. Logs each gradient that is lost. Idempotent.
        """
        with self.lock:
            while self._writing:
                self._ended()
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
            self.slots = SpillSlots(torch.empty(0, dtype=torch.uint8, device="cpu"))


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
