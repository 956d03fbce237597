"""Gradients that host memory has no room for: in the store, checked like everything there.

A gradient is cut into the pieces that the update will ask for, each a chunk of the store. What
comes from autograd is copied to a slot of staging memory and written from there while backward goes
on: nobody waits unless all slots are being written. What is added later is read into a slot, added
there and written again, as a new generation. Edits that work on each element by itself are kept and
made when a piece is next in memory, one after the other as torch would have made them.

A write that fails makes its gradient useless: it is told in the next call here, at the latest
before the update, and again to whoever asks for the values. Any thread, one at a time.
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
from offload.optim.gradient_handle import Edit
from offload.optim.spilled_gradient import ColdValues, SpilledGradient
from offload.planning.layout import Chunk, Slice
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.memory import MemoryStore
from offload.storage.outgoing import Outgoing

_PAGE = 4096
_LINE = 64
_WRITING, _READING = "gradient write", "gradient read"  # causes of waiting


@dataclass(eq=False)
class Slot:
    """Staging memory for one piece, or for the slices of one chunk of state."""

    memory: Tensor  # bytes
    tickets: list[Ticket[None]] = field(default_factory=list)  # that may touch it
    is_lost: bool = False  # the system may write to it at any time
    is_staged: bool = False  # the update uses it, or an addition

    @property
    def is_idle(self) -> bool:
        is_taken = self.is_lost or self.is_staged
        return not is_taken and all(ticket.done for ticket in self.tickets)

    def start(self, ticket: Ticket[None]) -> Ticket[None]:
        self.tickets = [one for one in self.tickets if not one.done] + [ticket]
        return ticket


@dataclass(eq=False)
class _SpilledRange:
    """Elements [begin, end) of a gradient. made: how many edits are in what is stored."""

    begin: int
    end: int
    key: str
    made: int = 0
    writing: _Writing | None = None


@dataclass(eq=False)
class _Writing:
    piece: _SpilledRange
    slot: Slot
    ticket: Ticket[None]
    whose: weakref.ref[Spilled]


class Staged:
    """A piece on its way into memory; its values count when `wait` has returned."""

    def __init__(
        self, whose: Spilled, piece: _SpilledRange, values: Tensor, slot: Slot | None
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
        """Nobody wants it any more; when this returns nothing touches its memory, or its slot is
        lost.
        """
        if self._ticket is not None:
            with suppress(OffloadError):  # there is an error that matters more
                self._land(self._ticket)

    def _land(self, ticket: Ticket[None]) -> None:
        """After Ctrl-C it can be waited for again: it goes on."""
        try:
            ticket.wait()
        except OffloadError as error:
            self._ticket = None
            if self._slot is not None:
                self._whose.area.lose_after(self._slot, error)
            raise
        self._ticket = None


def _break_off(each: Iterable[Staged]) -> None:
    for staged in each:
        staged.break_off()


class SpillArea:
    """Staging memory and room in a store for the gradients of one model. memory: bytes, page by
    page. room_bytes: that they may take of the store, all together.
    """

    def __init__(
        self,
        store: DiskStore | MemoryStore,
        memory: Tensor,
        room_bytes: int,
        metrics: Metrics,
    ) -> None:
        self.store, self.metrics = store, metrics
        self.lock = threading.RLock()
        self.wants_norms = False  # somebody has asked for one
        self.wants_squares = False
        self._memory = memory
        self._left_bytes = room_bytes
        self._numbers = count()
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._lost: list[Tensor] = []  # memory that the system may touch at any time
        self._writing: deque[_Writing] = deque()
        self._given_up: deque[tuple[list[str], int]] = deque()  # by finalizers
        self._living: weakref.WeakSet[SpilledGradient] = weakref.WeakSet()
        self._cut_of: dict[object, tuple[int, ...]] = {}
        self.divide(min(memory.nbytes, _PAGE))

    # --- slots ------------------------------------------------------------------------------------

    def divide(self, slot_bytes: int) -> None:
        """Slots of so many bytes, or of all there are. Nothing is under way but what timed out."""
        with self.lock:
            self.settle()
            slot_bytes = min(-(-max(slot_bytes, 1) // _PAGE) * _PAGE, self._memory.nbytes)
            begins = range(0, self._memory.nbytes - slot_bytes + 1, slot_bytes or 1)
            self._slots = [Slot(self._memory[begin : begin + slot_bytes]) for begin in begins]
            for slot in self._slots:
                slot.is_lost = any(_overlap(slot.memory, lost) for lost in self._lost)
            self._free = [slot for slot in self._slots if slot.is_idle]

    @property
    def slot_bytes(self) -> int:
        return self._slots[0].memory.nbytes if self._slots else 0

    def has_free(self) -> bool:
        """Whether `take` need not wait; it need not where no slot will ever come, and says so."""
        with self.lock:
            self._end_what_is_done()
            self._reclaim()
            is_to_come = self._writing or any(slot.is_staged for slot in self._slots)
            return bool(self._free) or not is_to_come

    def take(self) -> Slot:
        """A slot; the oldest write is waited for if there is none."""
        with self.lock:
            self._end_what_is_done()
            self._reclaim()
            while not self._free and self._writing:
                self._end_oldest()
            self._reclaim()
            if not self._free:
                raise StateError("gradients: no staging memory is free, and nothing is written")
            return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        with self.lock:
            if self._is_spare(slot) and slot in self._slots and slot not in self._free:
                self._free.append(slot)

    def clear_away(self, slots: Iterable[Slot]) -> None:
        """Nobody works on these any more."""
        for slot in slots:
            slot.is_staged = False
            self.give_back(slot)

    def lose_after(self, slot: Slot, error: OffloadError) -> None:
        """A transfer of a slot has ended so: does the system still touch the memory?"""
        if isinstance(error, StoreTimeout) and error.errno == errno.ETIMEDOUT:
            with self.lock:
                slot.is_lost = True
                self._lost.append(slot.memory)

    def _reclaim(self) -> None:
        """If there is no slot: those that an interrupted call has not given back, and those that
        were lost, once the drive has answered after all.
        """
        if self._free:
            return
        if self._lost and not self._is_waited_for():
            self._lost.clear()
            for slot in self._slots:
                slot.is_lost = False
        self._free = [slot for slot in self._slots if self._is_spare(slot)]

    def _is_waited_for(self) -> bool:
        """Whether the drive owes an answer to something that timed out."""
        return isinstance(self.store, DiskStore) and self.store.engine.abandoned_bytes > 0

    def _is_spare(self, slot: Slot) -> bool:
        """Nobody uses it. A write that has ended gives it back in its turn."""
        return slot.is_idle and all(writing.slot is not slot for writing in self._writing)

    # --- writes under way -------------------------------------------------------------------------

    def write(self, whose: Spilled, piece: _SpilledRange, values: Tensor, slot: Slot) -> None:
        """Start to store what is in a slot, which comes back by itself."""
        with self.lock:
            ticket = slot.start(self.store.write(piece.key, values))
            writing = _Writing(piece, slot, ticket, weakref.ref(whose))
            piece.writing = writing
            self._writing.append(writing)
            self.metrics.count("spilled_bytes", values.nbytes)

    def poll(self) -> None:
        """Tell of a write that has failed; waits for none."""
        with self.lock:
            self._end_what_is_done()

    def settle(self) -> None:
        """Return when all that was written is stored."""
        with self.lock:
            while self._writing:
                self._end_oldest()

    def finish(self, piece: _SpilledRange) -> None:
        """Wait for a piece that is being written."""
        with self.lock:
            while piece.writing is not None:
                self._end_oldest()

    def _end_what_is_done(self) -> None:
        while self._writing and self._writing[0].ticket.done:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Wait for the oldest write. If it fails, the others are waited for as well: each gradient
        that has lost something knows it when the error is told.
        """
        error = self._ended()
        if error is not None:
            while self._writing:
                self._ended()
            raise error

    def _ended(self) -> OffloadError | None:
        """Wait for the oldest write; what somebody must be told of it."""
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
            self.metrics.count("errors_after_an_error")  # nobody wants it any more
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
        """Cut what comes for `key` there from now on."""
        self._cut_of[key] = tuple(sorted({0, numel, *starts_and_ends}))

    def make(
        self, key: object, name: str, numel: int, dtype: torch.dtype, shape: torch.Size
    ) -> Spilled | None:
        """A gradient without values yet; None: others that somebody keeps have its room."""
        with self.lock:
            self._take_in()
            cuts = self._fitting(self._cut_of.get(key, (0, numel)), dtype)
            nbytes = sum(_page_up((end - begin) * dtype.itemsize) for begin, end in pairwise(cuts))
            if nbytes > self._left_bytes:
                return None
            self._left_bytes -= nbytes
            made = Spilled(self, next(self._numbers), name, cuts, dtype, shape)
            weakref.finalize(made, self._given_up.append, (made.keys, nbytes)).atexit = False
            return made

    def _fitting(self, cuts: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The same, with no piece larger than a slot."""
        most = max(1, self.slot_bytes // dtype.itemsize)
        inner = [at for begin, end in pairwise(cuts) for at in range(begin, end, most)]
        return [*inner, cuts[-1]]

    def show(self, param: Tensor, spilled: Spilled) -> SpilledGradient:
        """As torch sees it."""
        gradient = SpilledGradient.of(param, spilled)
        self._living.add(gradient)
        return gradient

    def _take_in(self) -> None:
        """Free what nobody holds any more."""
        while self._given_up:
            keys, nbytes = self._given_up.popleft()
            self._left_bytes += nbytes
            for key in keys:
                with suppress(StateError):  # it was never stored, or the store is closed
                    self.store.free(key)

    def close(self, make: Callable[[Tensor], Outgoing]) -> None:
        """The store is about to go: gradients that somebody holds stay, in places that `make`
        gives. Those that are lost already say so again. Idempotent.
        """
        with self.lock:
            while self._writing:
                self._ended()
            living = list(self._living)
            places: dict[int, Outgoing] = {}
            for number, gradient in enumerate(living):  # first: one file can have them all
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
    place.settle()
    return place.tensor


class Spilled:
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
        self.keys: list[str] = []  # all that the store may have of it
        self._cut_at(cuts)
        self._edits: list[tuple[int, int, Edit]] = []  # of elements [begin, end)
        self._norm: Tensor | None = None
        self._squares: Sequence[float] | None = None
        self.error: OffloadError | None = None  # of a write: some values are lost

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
        """Cut it elsewhere: the plan of the update has changed since it came."""
        with self.area.lock:
            values, norm, squares = self.load(), self._norm, self._squares
            self._free()
            self._cut_at(cuts)
            self._edits.clear()
            self.write(values.view(-1))
            self.area.settle()
            self._norm, self._squares = norm, squares

    def _fit(self, is_new: bool = False) -> None:
        """Cut it anew if slots have become smaller than its pieces. is_new: all of what is stored
        is about to be replaced.
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
            with suppress(StateError):  # it was never stored
                self.area.store.free(piece.key)

    # --- in ---------------------------------------------------------------------------------------

    def take(self, values: Tensor) -> None:
        """All of them, for the first time or anew, as autograd or somebody else has left them."""
        with self.area.lock, torch.no_grad():
            values = values.detach()
            self._look_at(values)
            self.write(values.reshape(-1))

    def _look_at(self, values: Tensor) -> None:
        """What is likely to be asked for is found out while they are here."""
        self._forget()
        if self.area.wants_norms:
            self._norm = torch.linalg.vector_norm(values)
        if self.area.wants_squares:
            self._squares = kernels.grad_stats(values.reshape(-1)).block_sums

    def _forget(self) -> None:
        self._norm = self._squares = None

    def write(self, values: Tensor, begin: int = 0) -> None:
        """Store these, flat, from element `begin` on: whole pieces. They are copied at once."""
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
        """Add these, from element `begin` on, in whole pieces; of any shape."""
        with self.area.lock, torch.no_grad(), self._whole_or_lost():
            self._forget()
            self._fit()
            flat = values.detach().reshape(-1)
            to_come = deque(self._within(begin, begin + flat.numel()))
            coming: deque[tuple[Staged, Slot]] = deque()
            slots: list[Slot] = []
            try:
                while to_come or coming:
                    while to_come and (not coming or self.area.has_free()):
                        slots.append(slot := self.area.take())
                        slot.is_staged = True
                        piece = to_come.popleft()
                        coming.append((Staged(self, piece, self._in(slot, piece), slot), slot))
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
        """Of what is done in parts and breaks off nobody must take what there is for a gradient."""
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

    def _store(self, piece: _SpilledRange, values: Tensor, slot: Slot) -> None:
        piece.made = len(self._edits)
        self.area.write(self, piece, values, slot)

    def edit(self, edit: Edit, begin: int = 0, end: int | None = None) -> None:
        """Change elements [begin, end) when they are next in memory. Where nothing of what is
        stored matters any more, nothing of it is lost.
        """
        with self.area.lock:
            self._forget()
            self._edits.append((begin, self.cuts[-1] if end is None else end, edit))
            if edit.is_blank and all(map(self._is_blank, self.pieces)):
                self.error = None

    def _make_edits(self, piece: _SpilledRange, values: Tensor) -> None:
        """Those that what is stored lacks."""
        with torch.no_grad():
            for begin, end, edit in self._edits[piece.made :]:
                first, last = max(begin, piece.begin), min(end, piece.end)
                if first >= last:
                    continue
                part = values[first - piece.begin : last - piece.begin]
                # With no dimensions torch reckons otherwise.
                edit(part.view(()) if self.shape.numel() == 1 and not self.shape else part)

    def _drop_edits(self) -> None:
        if all(piece.made == len(self._edits) for piece in self.pieces):
            self._edits.clear()
            for piece in self.pieces:
                piece.made = 0

    # --- out --------------------------------------------------------------------------------------

    def load(self) -> Tensor:
        """All of them, in memory of their own, with the gradient's shape."""
        with self.area.lock, torch.inference_mode(False), torch.no_grad():
            memory = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self._fill(memory.view(-1), self.pieces)
            return memory  # not a view: who holds it can be counted

    def load_part(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end), flat, in memory of their own."""
        with self.area.lock, torch.inference_mode(False), torch.no_grad():
            pieces = self._around(begin, end)
            first = pieces[0].begin if pieces else begin
            stop = pieces[-1].end if pieces else begin
            memory = torch.empty(stop - first, dtype=self.dtype, device="cpu")
            self._fill(memory, pieces)
            return memory[begin - first : end - first]

    def _fill(self, memory: Tensor, pieces: Sequence[_SpilledRange]) -> None:
        """Read these, one behind the other."""
        first = pieces[0].begin if pieces else 0
        each: list[Staged] = []
        try:
            for piece in pieces:
                part = memory[piece.begin - first : piece.end - first]
                each.append(Staged(self, piece, part, None))
            for staged in each:
                staged.wait()
        finally:
            _break_off(each)

    def store(self, values: Tensor) -> None:
        """These are the values from now on."""
        self.take(values)

    def put(self, values: Tensor, begin: int) -> None:
        """The same from element `begin` on, wherever pieces begin."""
        with self.area.lock, torch.no_grad():
            self._forget()
            pieces = self._around(begin, begin + values.numel())
            if pieces:
                first = pieces[0].begin
                whole = self.load_part(first, pieces[-1].end)
                whole[begin - first : begin - first + values.numel()].copy_(values)
                self.write(whole, first)

    def norm(self) -> Tensor | None:
        self.area.wants_norms = True
        return None if self._norm is None else self._norm.clone()

    def stage(self, begin: int, end: int, memory: Tensor, slot: Slot) -> Staged:
        """Bring the piece [begin, end) into a part of a slot."""
        with self.area.lock:
            piece = self.pieces[bisect_left(self._begins, begin)]
            assert (piece.begin, piece.end) == (begin, end), "cut for this plan"
            return Staged(self, piece, memory.view(self.dtype)[: end - begin], slot)

    def is_cut_at(self, begin: int, end: int) -> bool:
        """Whether `stage` can bring these elements at once."""
        at = bisect_left(self._begins, begin)
        return (
            at < len(self.pieces) and self.pieces[at].begin == begin and self.pieces[at].end == end
        )

    def _read(self, piece: _SpilledRange, values: Tensor, slot: Slot | None) -> Ticket[None] | None:
        """Start to read a piece as it is stored; None: what is there does not matter."""
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
        """Whether what is stored does not matter."""
        return any(
            edit.is_blank and begin <= piece.begin and piece.end <= end
            for begin, end, edit in self._edits[piece.made :]
        )

    def _in(self, slot: Slot, piece: _SpilledRange) -> Tensor:
        return slot.memory.view(self.dtype)[: piece.end - piece.begin]

    def _within(self, begin: int, end: int) -> list[_SpilledRange]:
        found = self._around(begin, end)
        assert not found or (found[0].begin >= begin and found[-1].end <= end), "whole pieces"
        return found

    def _around(self, begin: int, end: int) -> list[_SpilledRange]:
        return [piece for piece in self.pieces if piece.begin < end and begin < piece.end]

    @property
    def cold(self) -> ColdValues:
        """Once all of it is stored."""
        return self.part(0, self.cuts[-1])

    def part(self, begin: int, end: int) -> ColdPart:
        self.area.settle()
        if self.error is not None:
            raise self.error
        return ColdPart(self, begin, end - begin)


@dataclass(frozen=True)
class ColdPart:
    """Elements of a spilled gradient, from `begin` on, for the update."""

    whose: Spilled
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


class Shelf:
    """Spilled gradients on their way to the update, in the slots of an area: one for each chunk.
    firsts: elements at which gradients begin, where they are not whole.
    """

    def __init__(self, area: SpillArea, firsts: Mapping[int, int]) -> None:
        self._area, self._firsts = area, firsts
        self._cold: dict[int, ColdPart] = {}
        self._slots: dict[int, Slot] = {}  # by the number of the chunk

    def begin(self, grads: Mapping[int, Tensor | ColdValues], chunks: Iterable[Chunk]) -> None:
        """An update of these begins."""
        self.end()
        self._cold = {n: one for n, one in grads.items() if isinstance(one, ColdPart)}
        for whose, cuts in self._wrongly_cut(chunks).items():
            whose.cut_anew(sorted(cuts))

    def _wrongly_cut(self, chunks: Iterable[Chunk]) -> dict[Spilled, set[int]]:
        wanted: dict[Spilled, set[int]] = {}
        wrong: set[Spilled] = set()
        for chunk in chunks:
            for part in chunk.slices:
                if part.param in self._cold:
                    whose, begin, end = self._place(part)
                    wanted.setdefault(whose, {0, whose.cuts[-1]}).update((begin, end))
                    if not whose.is_cut_at(begin, end):
                        wrong.add(whose)
        return {whose: cuts for whose, cuts in wanted.items() if whose in wrong}

    def _place(self, part: Slice) -> tuple[Spilled, int, int]:
        cold = self._cold[part.param]
        begin = cold.begin + part.begin - self._firsts.get(part.param, 0)
        return cold.whose, begin, begin + part.end - part.begin

    def has_place(self, chunk: Chunk) -> bool:
        """Whether `take` need not wait."""
        is_wanted = any(part.param in self._cold for part in chunk.slices)
        return not is_wanted or self._area.has_free()

    def take(self, chunk: Chunk) -> dict[Slice, Staged]:
        """Start the way of a chunk's spilled slices."""
        wanted = [part for part in chunk.slices if part.param in self._cold]
        if not wanted:
            return {}
        slot = self._slots[chunk.number] = self._area.take()
        slot.is_staged = True
        found, at = {}, 0
        for part in wanted:
            whose, begin, end = self._place(part)
            nbytes = line_up((end - begin) * whose.dtype.itemsize)
            found[part] = whose.stage(begin, end, slot.memory[at : at + nbytes], slot)
            at += nbytes
        return found

    def give_back(self, chunk: Chunk) -> None:
        """The update is done with them."""
        slot = self._slots.pop(chunk.number, None)
        if slot is not None:
            self._area.clear_away([slot])

    def end(self) -> None:
        """No update is under way any more."""
        self._area.clear_away(self._slots.values())
        self._slots.clear()
        self._cold = {}


def slot_bytes(chunks: Iterable[Chunk], itemsizes: Mapping[int, int]) -> int:
    """Staging memory for the slices of any chunk. itemsizes: of gradients that are spilled, by the
    number of their parameter.
    """
    each = (
        sum(
            line_up((part.end - part.begin) * itemsizes[part.param])
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


def line_up(nbytes: int) -> int:
    """How far apart slices of a chunk are in a slot."""
    return -(-nbytes // _LINE) * _LINE
