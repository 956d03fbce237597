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
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import OffloadError, StateError, StoreError, StoreTimeout
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.gradient_handle import Answers, GradientHandle, answers_of_stored
from offload.optim.gradient_source import Gradient, GradientEdit
from offload.planning.layout import Chunk, Slice
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.outgoing import Outgoing

_PAGE = 4096
_LINE = 64
_WRITING, _READING = "gradient write", "gradient read"  # names of the waits in metrics


@dataclass(eq=False)
class SpillSlot:
    """A slot of the staging buffer, for one range or for the slices of one chunk of state."""

    memory: Tensor  # bytes
    tickets: list[Ticket[None]] = field(default_factory=list)  # transfers that may touch it
    is_lost: bool = False  # after a timeout the operating system may still write to it
    is_staged: bool = False  # the update or an accumulation uses it

    @property
    def is_idle(self) -> bool:
        is_taken = self.is_lost or self.is_staged
        return not is_taken and all(ticket.done for ticket in self.tickets)

    def start(self, ticket: Ticket[None]) -> Ticket[None]:
        self.tickets = [one for one in self.tickets if not one.done] + [ticket]
        return ticket


@dataclass(eq=False)
class _SpilledRange:
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
    piece: _SpilledRange
    slot: SpillSlot
    ticket: Ticket[None]
    whose: weakref.ref[SpilledGradientValues]


class StagedGradientRange:
    """A range that is being read into memory; its values are valid once `wait` has returned."""

    def __init__(
        self,
        whose: SpilledGradientValues,
        piece: _SpilledRange,
        values: Tensor,
        slot: SpillSlot | None,
    ) -> None:
        self._whose, self.piece, self.values, self._slot = whose, piece, values, slot
        self._ticket = whose._read(piece, values, slot)

    @property
    def done(self) -> bool:
        return self._ticket is None or self._ticket.done

    def wait(self) -> None:
        if self._ticket is not None:
            with self._whose.area.metrics.span(_READING):
                self._land(self._ticket)
        self._whose._make_edits(self.piece, self.values)

    def break_off(self) -> None:
        """Abandon the range. Waits for its read: then nothing touches its memory, or its slot is
        marked as lost.
        """
        if self._ticket is not None:
            with suppress(OffloadError):  # the caller handles another error
                self._land(self._ticket)

    def _land(self, ticket: Ticket[None]) -> None:
        """Wait for the read. After Ctrl-C it goes on and can be waited for again."""
        try:
            ticket.wait()
        except OffloadError as error:
            self._ticket = None
            if self._slot is not None:
                self._whose.area.lose_after(self._slot, error)
            raise
        self._ticket = None


def _break_off(each: Iterable[StagedGradientRange]) -> None:
    for staged in each:
        staged.break_off()


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
        self._memory = memory
        self._left_bytes = room_bytes
        self._numbers = count()
        self._slots: list[SpillSlot] = []
        self._free: list[SpillSlot] = []
        self._lost: list[Tensor] = []  # memory that the operating system may write to at any time
        self._writing: deque[_Writing] = deque()
        self._given_up: deque[tuple[list[str], int]] = deque()  # filled by finalizers
        self._living: weakref.WeakSet[GradientHandle] = weakref.WeakSet()
        self._cut_of: dict[object, tuple[int, ...]] = {}
        self.divide(min(memory.nbytes, _PAGE))

    # --- slots ------------------------------------------------------------------------------------

    def divide(self, slot_bytes: int) -> None:
        """Divide the staging buffer into slots of `slot_bytes`, or into one if it is smaller.
        Waits for writes; no slot may be in use but those of transfers that timed out.
        """
        with self.lock:
            self.settle()
            slot_bytes = min(-(-max(slot_bytes, 1) // _PAGE) * _PAGE, self._memory.nbytes)
            begins = range(0, self._memory.nbytes - slot_bytes + 1, slot_bytes or 1)
            self._slots = [SpillSlot(self._memory[begin : begin + slot_bytes]) for begin in begins]
            for slot in self._slots:
                slot.is_lost = any(_overlap(slot.memory, lost) for lost in self._lost)
            self._free = [slot for slot in self._slots if slot.is_idle]

    @property
    def slot_bytes(self) -> int:
        return self._slots[0].memory.nbytes if self._slots else 0

    def has_free(self) -> bool:
        """Return whether `take` would not wait: a slot is free, or none will ever become free and
        `take` raises.
        """
        with self.lock:
            self._end_what_is_done()
            self._reclaim()
            is_to_come = self._writing or any(slot.is_staged for slot in self._slots)
            return bool(self._free) or not is_to_come

    def take(self) -> SpillSlot:
        """Take a free slot. Waits for the oldest write while there is none; raises `StateError` if
        there is none to wait for.
        """
        with self.lock:
            self._end_what_is_done()
            self._reclaim()
            while not self._free and self._writing:
                self._end_oldest()
            self._reclaim()
            if not self._free:
                raise StateError("gradients: no staging memory is free, and no write is in flight")
            return self._free.pop()

    def give_back(self, slot: SpillSlot) -> None:
        with self.lock:
            if self._is_spare(slot) and slot in self._slots and slot not in self._free:
                self._free.append(slot)

    def clear_away(self, slots: Iterable[SpillSlot]) -> None:
        """Return staged slots to the area; neither a transfer nor the update uses them any more."""
        for slot in slots:
            slot.is_staged = False
            self.give_back(slot)

    def lose_after(self, slot: SpillSlot, error: OffloadError) -> None:
        """Mark a slot as lost if its transfer ended with a timeout: the operating system may still
        touch the memory.
        """
        if isinstance(error, StoreTimeout) and error.errno == errno.ETIMEDOUT:
            with self.lock:
                slot.is_lost = True
                self._lost.append(slot.memory)

    def _reclaim(self) -> None:
        """Recover slots if none is free: those that an interrupted call has not returned, and lost
        ones once the drive has answered after all.
        """
        if self._free:
            return
        if self._lost and not self._is_waited_for():
            self._lost.clear()
            for slot in self._slots:
                slot.is_lost = False
        self._free = [slot for slot in self._slots if self._is_spare(slot)]

    def _is_waited_for(self) -> bool:
        """Return whether the operating system still runs a transfer that timed out."""
        return self.store.engine.abandoned_bytes > 0

    def _is_spare(self, slot: SpillSlot) -> bool:
        """Return whether the slot is unused. One whose write has ended is not: `_end` returns it
        when the write is taken from the queue.
        """
        return slot.is_idle and all(writing.slot is not slot for writing in self._writing)

    # --- writes in flight -------------------------------------------------------------------------

    def write(
        self, whose: SpilledGradientValues, piece: _SpilledRange, values: Tensor, slot: SpillSlot
    ) -> None:
        """Begin to write a range from its slot. The slot is free again when the write has ended."""
        with self.lock:
            ticket = slot.start(self.store.write(piece.key, values))
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

    def finish(self, piece: _SpilledRange) -> None:
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
            self.lose_after(writing.slot, error)
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
        self.give_back(writing.slot)

    # --- gradients --------------------------------------------------------------------------------

    def cut(self, key: object, numel: int, starts_and_ends: Iterable[int]) -> None:
        """Set the elements at which gradients that `make` makes for `key` are cut from now on."""
        self._cut_of[key] = tuple(sorted({0, numel, *starts_and_ends}))

    def make(
        self, key: object, name: str, numel: int, dtype: torch.dtype, shape: torch.Size
    ) -> SpilledGradientValues | None:
        """Make a spilled gradient, without values yet. Return None if there is no room: gradients
        that the user's code still holds have it.
        """
        with self.lock:
            self._take_in()
            cuts = self._fitting(self._cut_of.get(key, (0, numel)), dtype)
            nbytes = sum(_page_up((end - begin) * dtype.itemsize) for begin, end in pairwise(cuts))
            if nbytes > self._left_bytes:
                return None
            self._left_bytes -= nbytes
            made = SpilledGradientValues(self, next(self._numbers), name, cuts, dtype, shape)
            weakref.finalize(made, self._given_up.append, (made.keys, nbytes)).atexit = False
            return made

    def _fitting(self, cuts: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the cuts, with more of them where a range would be larger than a slot."""
        most = max(1, self.slot_bytes // dtype.itemsize)
        inner = [at for begin, end in pairwise(cuts) for at in range(begin, end, most)]
        return [*inner, cuts[-1]]

    def show(self, param: Tensor, spilled: SpilledGradientValues) -> GradientHandle:
        """Make the handle by which torch and the user's code see the gradient."""
        gradient = GradientHandle.of(param, spilled)
        self._living.add(gradient)
        return gradient

    def _take_in(self) -> None:
        """Free the chunks of gradients that were garbage-collected since."""
        while self._given_up:
            keys, nbytes = self._given_up.popleft()
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
            self._slots, self._free = [], []
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")


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


class SpilledGradientValues:
    """The values of one gradient, flat, in the area's store."""

    def __init__(
        self,
        area: SpillArea,
        number: int,
        name: str,
        cuts: Sequence[int],
        dtype: torch.dtype,
        shape: torch.Size,
    ) -> None:
        self.area, self.name, self.dtype, self.shape = area, name, dtype, shape
        self._number = number
        self.keys: list[str] = []  # all chunks of it that the store may have
        self._cut_at(cuts)
        self._edits: list[
            tuple[int, int, GradientEdit]
        ] = []  # elements [begin, end), and their edit
        self._norm: Tensor | None = None
        self._squares: Sequence[float] | None = None
        self.error: OffloadError | None = None  # of a write that failed: some values are lost

    def _cut_at(self, cuts: Sequence[int]) -> None:
        self.cuts = cuts
        self.pieces = [
            _SpilledRange(begin, end, f"gradient {self._number} of {self.name}[{begin}:{end}]")
            for begin, end in pairwise(cuts)
            if begin < end
        ]
        self._begins = [piece.begin for piece in self.pieces]
        self.keys += [piece.key for piece in self.pieces if piece.key not in self.keys]

    def cut_anew(self, cuts: Sequence[int]) -> None:
        """Cut the gradient at other places, since the plan of the update has changed. Loads all
        values and writes them again.
        """
        with self.area.lock:
            values, norm, squares = self.load(), self._norm, self._squares
            self._free()
            self._cut_at(cuts)
            self._edits.clear()
            self.write(values.view(-1))
            self.area.settle()
            self._norm, self._squares = norm, squares

    def _fit(self, is_new: bool = False) -> None:
        """Cut the gradient anew if slots have become smaller than its ranges. is_new: all stored
        values are about to be replaced, so they need not be kept.
        """
        largest = max((piece.end - piece.begin for piece in self.pieces), default=0)
        is_closed = not self.area.slot_bytes
        if is_closed or largest * self.dtype.itemsize <= self.area.slot_bytes:
            return
        cuts = self.area._fitting(self.cuts, self.dtype)
        if not is_new:
            self.cut_anew(cuts)
            return
        self._free()
        self._cut_at(cuts)
        self._edits.clear()

    def _free(self) -> None:
        for piece in self.pieces:
            with suppress(StateError):  # never written
                self.area.store.free(piece.key)

    # --- write ------------------------------------------------------------------------------------

    def take(self, values: Tensor) -> None:
        """Replace all values by these, in the gradient's shape: autograd's or the user's."""
        with self.area.lock, torch.no_grad():
            values = values.detach()
            self._look_at(values)
            self.write(values.reshape(-1))

    def _look_at(self, values: Tensor) -> None:
        """Compute the norm and the sums of squares while the values are in memory, if they have
        been asked for before.
        """
        self._forget()
        if self.area.wants_norms:
            self._norm = torch.linalg.vector_norm(values)
        if self.area.wants_squares:
            self._squares = kernels.grad_stats(values.reshape(-1)).block_sums

    def _forget(self) -> None:
        self._norm = self._squares = None

    def write(self, values: Tensor, begin: int = 0) -> None:
        """Write these flat values from element `begin` on; they must cover whole ranges. Returns
        when they are copied to slots; the writes go on.
        """
        with self.area.lock, torch.no_grad(), self._whole_or_lost():
            self._fit(begin == 0 and values.numel() == self.cuts[-1])
            for piece in self._within(begin, begin + values.numel()):
                slot = self.area.take()
                try:
                    here = self._in(slot, piece)
                    here.copy_(values[piece.begin - begin : piece.end - begin])
                    self._store(piece, here, slot)
                except BaseException:
                    self.area.give_back(slot)
                    raise
            if begin == 0 and values.numel() == self.cuts[-1]:
                self.error = None
            self._drop_edits()

    def add(self, values: Tensor, begin: int = 0) -> None:
        """Add these values, of any shape, from element `begin` on; they must cover whole ranges.
        Reads ahead as far as slots are free.
        """
        with self.area.lock, torch.no_grad(), self._whole_or_lost():
            self._forget()
            self._fit()
            flat = values.detach().reshape(-1)
            to_come = deque(self._within(begin, begin + flat.numel()))
            coming: deque[tuple[StagedGradientRange, SpillSlot]] = deque()
            slots: list[SpillSlot] = []
            try:
                while to_come or coming:
                    while to_come and (not coming or self.area.has_free()):
                        slots.append(slot := self.area.take())
                        slot.is_staged = True
                        piece = to_come.popleft()
                        coming.append(
                            (StagedGradientRange(self, piece, self._in(slot, piece), slot), slot)
                        )
                    staged, slot = coming[0]
                    staged.wait()
                    piece = staged.piece
                    staged.values.add_(flat[piece.begin - begin : piece.end - begin])
                    self._store(piece, staged.values, slot)
                    slots.remove(slot)
                    slot.is_staged = False
                    coming.popleft()
            finally:
                _break_off(staged for staged, _ in coming)
                self.area.clear_away(slots)
            self._drop_edits()

    @contextmanager
    def _whole_or_lost(self) -> Iterator[None]:
        """Mark the gradient as lost if the block raises: a partly written one must not be used."""
        try:
            yield
        except BaseException as error:
            if self.error is None:
                self.error = (
                    error
                    if isinstance(error, StoreError)
                    else StateError(
                        f"gradient of {self.name}: was only partly written when {error!r} broke it "
                        "off; zero_grad(), and run backward again"
                    )
                )
            raise

    def _store(self, piece: _SpilledRange, values: Tensor, slot: SpillSlot) -> None:
        piece.made = len(self._edits)
        self.area.write(self, piece, values, slot)

    def edit(self, edit: GradientEdit, begin: int = 0, end: int | None = None) -> None:
        """Record an edit of elements [begin, end), to be made when they are next in memory. If
        edits replace all stored values, an earlier error no longer matters and is cleared.
        """
        with self.area.lock:
            self._forget()
            self._edits.append((begin, self.cuts[-1] if end is None else end, edit))
            if edit.is_blank and all(map(self._is_blank, self.pieces)):
                self.error = None

    def _make_edits(self, piece: _SpilledRange, values: Tensor) -> None:
        """Make the edits that the stored values of the range lack, in order."""
        with torch.no_grad():
            for begin, end, edit in self._edits[piece.made :]:
                first, last = max(begin, piece.begin), min(end, piece.end)
                if first >= last:
                    continue
                part = values[first - piece.begin : last - piece.begin]
                # torch promotes types differently for tensors without dimensions.
                edit(part.view(()) if self.shape.numel() == 1 and not self.shape else part)

    def _drop_edits(self) -> None:
        if all(piece.made == len(self._edits) for piece in self.pieces):
            self._edits.clear()
            for piece in self.pieces:
                piece.made = 0

    # --- read -------------------------------------------------------------------------------------

    def load(self, func: object = None) -> Tensor:
        """Load all values into memory of their own, with the gradient's shape."""
        with self.area.lock, torch.inference_mode(False), torch.no_grad():
            memory = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self._fill(memory.view(-1), self.pieces)
            return memory  # not a view: its references can be counted

    def load_part(self, begin: int, end: int) -> Tensor:
        """Load elements [begin, end), flat, into memory of their own."""
        with self.area.lock, torch.inference_mode(False), torch.no_grad():
            pieces = self._around(begin, end)
            first = pieces[0].begin if pieces else begin
            stop = pieces[-1].end if pieces else begin
            memory = torch.empty(stop - first, dtype=self.dtype, device="cpu")
            self._fill(memory, pieces)
            return memory[begin - first : end - first]

    def _fill(self, memory: Tensor, pieces: Sequence[_SpilledRange]) -> None:
        """Read these adjacent ranges into `memory`, one behind the other, all in flight at once."""
        first = pieces[0].begin if pieces else 0
        each: list[StagedGradientRange] = []
        try:
            for piece in pieces:
                part = memory[piece.begin - first : piece.end - first]
                each.append(StagedGradientRange(self, piece, part, None))
            for staged in each:
                staged.wait()
        finally:
            _break_off(each)

    def store(self, values: Tensor) -> None:
        """Replace all values by these."""
        self.take(values)

    def put(self, values: Tensor, begin: int) -> None:
        """Replace values from element `begin` on; they need not cover whole ranges, so the ranges
        around them are loaded first.
        """
        with self.area.lock, torch.no_grad():
            self._forget()
            pieces = self._around(begin, begin + values.numel())
            if pieces:
                first = pieces[0].begin
                whole = self.load_part(first, pieces[-1].end)
                whole[begin - first : begin - first + values.numel()].copy_(values)
                self.write(whole, first)

    def norm(self, order: float = 2.0) -> Tensor | None:
        self.area.wants_norms = True
        return None if self._norm is None or order != 2.0 else self._norm.clone()

    def stage(self, begin: int, end: int, memory: Tensor, slot: SpillSlot) -> StagedGradientRange:
        """Begin to read the range [begin, end) into `memory`, a part of `slot`."""
        with self.area.lock:
            piece = self.pieces[bisect_left(self._begins, begin)]
            assert (piece.begin, piece.end) == (begin, end), "cut for this plan"
            return StagedGradientRange(self, piece, memory.view(self.dtype)[: end - begin], slot)

    def is_cut_at(self, begin: int, end: int) -> bool:
        """Return whether these elements are one range, which `stage` can read."""
        at = bisect_left(self._begins, begin)
        return (
            at < len(self.pieces) and self.pieces[at].begin == begin and self.pieces[at].end == end
        )

    def _read(
        self, piece: _SpilledRange, values: Tensor, slot: SpillSlot | None
    ) -> Ticket[None] | None:
        """Begin to read a range as it is stored. Return None, with `values` zeroed, if an edit will
        replace the stored values anyway. Raises the error of a gradient that is lost.
        """
        if self.error is not None:
            raise self.error
        if self._is_blank(piece):
            values.zero_()
            return None
        self.area.finish(piece)
        ticket = self.area.store.read(piece.key, values, Priority.PREFETCH)
        self.area.metrics.count("spilled_read_bytes", values.nbytes)
        return slot.start(ticket) if slot is not None else ticket

    def _is_blank(self, piece: _SpilledRange) -> bool:
        """Return whether an edit replaces the stored values of the range without reading them."""
        return any(
            edit.is_blank and begin <= piece.begin and piece.end <= end
            for begin, end, edit in self._edits[piece.made :]
        )

    def _in(self, slot: SpillSlot, piece: _SpilledRange) -> Tensor:
        return slot.memory.view(self.dtype)[: piece.end - piece.begin]

    def _within(self, begin: int, end: int) -> list[_SpilledRange]:
        found = self._around(begin, end)
        assert not found or (found[0].begin >= begin and found[-1].end <= end), "whole pieces"
        return found

    def _around(self, begin: int, end: int) -> list[_SpilledRange]:
        return [piece for piece in self.pieces if piece.begin < end and begin < piece.end]

    @property
    def answers(self) -> Answers:
        return answers_of_stored()

    @property
    def input(self) -> Gradient:
        """The values for the update, once all writes have ended."""
        return self.part(0, self.cuts[-1])

    def part(self, begin: int, end: int) -> SpilledGradientPart:
        self.area.settle()
        if self.error is not None:
            raise self.error
        return SpilledGradientPart(self, begin, end - begin)


@dataclass(frozen=True)
class SpilledGradientPart:
    """A part of a spilled gradient for the update: `count` elements of `whose`, from `begin` on."""

    whose: SpilledGradientValues
    begin: int
    count: int

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return self.whose.dtype.itemsize

    def load(self) -> Tensor:
        return self.whose.load_part(self.begin, self.begin + self.count)

    def block_sums(self) -> Sequence[float]:
        known, self.whose.area.wants_squares = self.whose._squares, True
        is_whole = self.count == self.whose.cuts[-1]
        if known is not None and is_whole:
            return known
        return kernels.grad_stats(self.load()).block_sums


class SpilledGradientReader:
    """A reader of spilled gradients for the update: it stages the slices of each chunk of state in
    one slot of the area. firsts: by the number of a parameter, the element at which its gradient
    begins, for gradients that are not whole.
    """

    def __init__(self, area: SpillArea, firsts: Mapping[int, int]) -> None:
        self._area, self._firsts = area, firsts
        self._cold: dict[int, SpilledGradientPart] = {}
        self._slots: dict[int, SpillSlot] = {}  # by the number of the chunk

    def begin(self, grads: Mapping[int, Tensor | Gradient], chunks: Iterable[Chunk]) -> None:
        """Begin an update of these gradients; cut those anew that are not cut as `chunks` are."""
        self.end()
        self._cold = {n: one for n, one in grads.items() if isinstance(one, SpilledGradientPart)}
        for whose, cuts in self._wrongly_cut(chunks).items():
            whose.cut_anew(sorted(cuts))

    def _wrongly_cut(self, chunks: Iterable[Chunk]) -> dict[SpilledGradientValues, set[int]]:
        wanted: dict[SpilledGradientValues, set[int]] = {}
        wrong: set[SpilledGradientValues] = set()
        for chunk in chunks:
            for part in chunk.slices:
                if part.param in self._cold:
                    whose, begin, end = self._place(part)
                    wanted.setdefault(whose, {0, whose.cuts[-1]}).update((begin, end))
                    if not whose.is_cut_at(begin, end):
                        wrong.add(whose)
        return {whose: cuts for whose, cuts in wanted.items() if whose in wrong}

    def _place(self, part: Slice) -> tuple[SpilledGradientValues, int, int]:
        cold = self._cold[part.param]
        begin = cold.begin + part.begin - self._firsts.get(part.param, 0)
        return cold.whose, begin, begin + part.end - part.begin

    def has_place(self, chunk: Chunk) -> bool:
        """Return whether `take` would not wait for a slot."""
        is_wanted = any(part.param in self._cold for part in chunk.slices)
        return not is_wanted or self._area.has_free()

    def take(self, chunk: Chunk) -> dict[Slice, StagedGradientRange]:
        """Begin to read a chunk's spilled slices into one slot. Waits if no slot is free."""
        wanted = [part for part in chunk.slices if part.param in self._cold]
        if not wanted:
            return {}
        slot = self._slots[chunk.number] = self._area.take()
        slot.is_staged = True
        found, at = {}, 0
        for part in wanted:
            whose, begin, end = self._place(part)
            nbytes = round_up_to_cache_line((end - begin) * whose.dtype.itemsize)
            found[part] = whose.stage(begin, end, slot.memory[at : at + nbytes], slot)
            at += nbytes
        return found

    def give_back(self, chunk: Chunk) -> None:
        """Return the chunk's slot to the area once the update has used its slices."""
        slot = self._slots.pop(chunk.number, None)
        if slot is not None:
            self._area.clear_away([slot])

    def end(self) -> None:
        """End the update: return all its slots to the area and release the gradients."""
        self._area.clear_away(self._slots.values())
        self._slots.clear()
        self._cold = {}


def slot_bytes(chunks: Iterable[Chunk], itemsizes: Mapping[int, int]) -> int:
    """Return the bytes of a slot that holds the spilled slices of any one chunk. itemsizes: bytes
    per element of the spilled gradients, by the number of their parameter.
    """
    each = (
        sum(
            round_up_to_cache_line((part.end - part.begin) * itemsizes[part.param])
            for part in chunk.slices
            if part.param in itemsizes
        )
        for chunk in chunks
    )
    return max(each, default=0)


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def round_up_to_cache_line(nbytes: int) -> int:
    """Round up to the distance between slices of a chunk in a slot: whole cache lines."""
    return -(-nbytes // _LINE) * _LINE
