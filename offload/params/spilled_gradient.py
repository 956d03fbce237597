"""One gradient in the store: its ranges, edits that are still to be made, and its values.

Elementwise edits are recorded, and made when a range is next in memory, in the order in which torch
would have made them. Of a write that fails the values are lost: every later use raises its error.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import OffloadError, StateError, StoreError
from offload.core.ticket import Ticket
from offload.optim.gradient_handle import Answers, answers_of_stored
from offload.optim.gradient_source import Gradient, GradientEdit
from offload.params.spill import SpillArea, SpilledRange, SpillSlot
from offload.storage.engine import Priority

_READING = "gradient read"  # name of the wait in metrics


class StagedGradientRange:
    """A range that is being read into memory, a part of `slot` if one is given; its values are
    valid once `wait` has returned. Raises the error of a gradient that is lost.
    """

    def __init__(
        self,
        whose: SpilledGradientValues,
        piece: SpilledRange,
        memory: Tensor,
        slot: SpillSlot | None,
    ) -> None:
        area = whose.area
        self._whose, self.piece, self._slot = whose, piece, slot
        self.values = memory.view(whose.dtype)[: piece.end - piece.begin]
        self._ticket: Ticket[None] | None = None
        with area.lock:
            if whose.error is not None:
                raise whose.error
            if whose.is_blank(piece):
                self.values.zero_()  # an edit will replace the stored values anyway
                return
            area.settle(piece)
            self._ticket = area.store.read(piece.key, self.values, Priority.PREFETCH)
            area.metrics.count("spilled_read_bytes", self.values.nbytes)
            if slot is not None:
                slot.tickets.append(self._ticket)

    @property
    def done(self) -> bool:
        return self._ticket is None or self._ticket.done

    def wait(self) -> None:
        if self._ticket is not None:
            with self._whose.area.metrics.span(_READING):
                self._land(self._ticket)
        self._whose.make_edits(self.piece, self.values)

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
        self._edits: list[tuple[int, int, GradientEdit]] = []  # of elements [begin, end)
        self._norm: Tensor | None = None
        self._squares: Sequence[float] | None = None
        self.error: OffloadError | None = None  # of a write that failed: some values are lost

    @classmethod
    def make(
        cls, area: SpillArea, key: object, name: str, like: Tensor
    ) -> SpilledGradientValues | None:
        """Make a spilled gradient, without values yet. Return None if the area has no room, since
        user code keeps an older gradient in it.
        """
        with area.lock:
            room = area.reserve(key, like.numel(), like.dtype)
            if room is None:
                area.metrics.count("gradients_outside_of_their_place")
                return None
            number, cuts, nbytes = room
            made = cls(area, number, name, cuts, like.dtype, like.shape)
            # Not a method of the area, which it would keep.
            weakref.finalize(made, area.given_up.append, (made.keys, nbytes)).atexit = False
            return made

    def _cut_at(self, cuts: Sequence[int]) -> None:
        self.cuts = cuts
        self.pieces = [
            SpilledRange(begin, end, f"gradient {self._number} of {self.name}[{begin}:{end}]")
            for begin, end in pairwise(cuts)
            if begin < end
        ]
        self._begins = [piece.begin for piece in self.pieces]
        self._largest = max((piece.end - piece.begin for piece in self.pieces), default=0)
        self.keys += [piece.key for piece in self.pieces if piece.key not in self.keys]

    def cut_anew(self, cuts: Sequence[int], keeps_values: bool = True) -> None:
        """Cut the gradient at other places, since slots or the plan of the update have changed.
        Loads all values and writes them again, unless they are about to be replaced.
        """
        with self.area.lock:
            values = self.load() if keeps_values else None
            norm, squares = self._norm, self._squares
            for piece in self.pieces:
                with suppress(StateError):  # never written
                    self.area.store.free(piece.key)
            self._cut_at(cuts)
            self._edits.clear()
            if values is not None:
                self.write(values.view(-1))
                self.area.settle()
            self._norm, self._squares = norm, squares

    def _fit(self, keeps_values: bool) -> None:
        """Cut the gradient anew if slots have become smaller than its ranges."""
        if 0 < self.area.slot_bytes < self._largest * self.dtype.itemsize:
            self.cut_anew(self.area.fitting(self.cuts, self.dtype), keeps_values)

    # --- write ------------------------------------------------------------------------------------

    def take(self, values: Tensor) -> None:
        """Replace all values by these, in the gradient's shape: autograd's or the user's. Compute
        their norm and sums of squares while they are in memory, if those were asked for before.
        """
        with self.area.lock, torch.no_grad():
            values = values.detach()
            self._norm = self._squares = None
            if self.area.wants_norms:
                self._norm = torch.linalg.vector_norm(values)
            if self.area.wants_squares:
                self._squares = kernels.grad_stats(values.reshape(-1)).block_sums
            self.write(values.reshape(-1))

    store = take

    def write(self, values: Tensor, begin: int = 0) -> None:
        """Write these flat values from element `begin` on; they must cover whole ranges. Returns
        when they are copied to slots; the writes go on.
        """
        is_all = begin == 0 and values.numel() == self.cuts[-1]
        with self._changing():
            self._fit(keeps_values=not is_all)
            for piece in self._around(begin, begin + values.numel(), is_whole=True):
                slot = self.area.take()
                here = slot.memory.view(self.dtype)[: piece.end - piece.begin]
                here.copy_(values[piece.begin - begin : piece.end - begin])
                piece.made = len(self._edits)
                self.area.write(self, piece, here, slot)
            if is_all:
                self.error = None

    def fill(self, values: Tensor, begin: int) -> None:
        """Write the first values of the gradient: all of them, or those of whole ranges."""
        if values.numel() == self.cuts[-1]:
            self.take(values.view(self.shape))
        else:
            self.write(values, begin)

    def add(self, values: Tensor, begin: int = 0) -> None:
        """Add these values, of any shape, from element `begin` on; they must cover whole ranges.
        Reads ahead as far as slots are free.
        """
        with self._changing():
            self._norm = self._squares = None
            self._fit(keeps_values=True)
            flat = values.detach().reshape(-1)
            to_come = deque(self._around(begin, begin + flat.numel(), is_whole=True))
            coming: deque[tuple[StagedGradientRange, SpillSlot]] = deque()
            try:
                while to_come or coming:
                    while to_come and (not coming or self.area.has_free()):
                        slot = self.area.take()
                        piece = to_come.popleft()
                        coming.append((StagedGradientRange(self, piece, slot.memory, slot), slot))
                        slot.is_staged = True
                    staged, slot = coming[0]
                    staged.wait()
                    piece = staged.piece
                    staged.values.add_(flat[piece.begin - begin : piece.end - begin])
                    piece.made = len(self._edits)
                    self.area.write(self, piece, staged.values, slot)
                    slot.is_staged = False
                    coming.popleft()
            finally:
                for staged, slot in coming:
                    staged.break_off()
                    slot.is_staged = False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock while the block changes values. Mark the gradient as lost if it raises: a
        partly written one must not be used. Forget the edits that all stored values have.
        """
        with self.area.lock, torch.no_grad():
            try:
                yield
            except BaseException as error:
                if self.error is None and isinstance(error, StoreError):
                    self.error = error
                elif self.error is None:
                    self.error = StateError(
                        f"gradient of {self.name}: was only partly written when {error!r} broke it "
                        "off; zero_grad(), and run backward again"
                    )
                raise
            if all(piece.made == len(self._edits) for piece in self.pieces):
                self._edits.clear()
                for piece in self.pieces:
                    piece.made = 0

    def edit(self, edit: GradientEdit, begin: int = 0, end: int | None = None) -> None:
        """Record an edit of elements [begin, end), to be made when they are next in memory. If
        edits replace all stored values, an earlier error no longer matters and is cleared.
        """
        with self.area.lock:
            self._norm = self._squares = None
            self._edits.append((begin, self.cuts[-1] if end is None else end, edit))
            if edit.is_blank and all(map(self.is_blank, self.pieces)):
                self.error = None

    def make_edits(self, piece: SpilledRange, values: Tensor) -> None:
        """Make the edits that the stored values of the range lack, in order."""
        with torch.no_grad():
            for begin, end, edit in self._edits[piece.made :]:
                first, last = max(begin, piece.begin), min(end, piece.end)
                if first >= last:
                    continue
                part = values[first - piece.begin : last - piece.begin]
                # torch promotes types differently for tensors without dimensions.
                edit(part.view(()) if self.shape.numel() == 1 and not self.shape else part)

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

    def _fill(self, memory: Tensor, pieces: Sequence[SpilledRange]) -> None:
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
            for staged in each:
                staged.break_off()

    def put(self, values: Tensor, begin: int) -> None:
        """Replace values from element `begin` on; they need not cover whole ranges, so the ranges
        around them are loaded first.
        """
        with self.area.lock, torch.no_grad():
            self._norm = self._squares = None
            pieces = self._around(begin, begin + values.numel())
            if pieces:
                first = pieces[0].begin
                whole = self.load_part(first, pieces[-1].end)
                whole[begin - first : begin - first + values.numel()].copy_(values)
                self.write(whole, first)

    def norm(self, order: float = 2.0) -> Tensor | None:
        self.area.wants_norms = True
        return None if self._norm is None or order != 2.0 else self._norm.clone()

    def parts(self, most: int) -> Iterator[tuple[int, int]]:
        """Cut the gradient into parts [begin, end) of whole ranges, of at most `most` elements."""
        begin = end = 0
        for piece in self.pieces:
            if piece.end - begin > most:
                yield begin, end
                begin = piece.begin
            end = piece.end
        yield begin, end

    def range_of(self, begin: int, end: int) -> SpilledRange | None:
        """Return the range of these elements; None: the gradient is cut at other places."""
        at = bisect_left(self._begins, begin)
        piece = self.pieces[at] if at < len(self.pieces) else None
        return piece if piece is not None and (piece.begin, piece.end) == (begin, end) else None

    def is_blank(self, piece: SpilledRange) -> bool:
        """Return whether an edit replaces the stored values of the range without reading them."""
        return any(
            edit.is_blank and begin <= piece.begin and piece.end <= end
            for begin, end, edit in self._edits[piece.made :]
        )

    def _around(self, begin: int, end: int, is_whole: bool = False) -> list[SpilledRange]:
        """Return the ranges that have some of these elements. is_whole: and no others."""
        found = [piece for piece in self.pieces if piece.begin < end and begin < piece.end]
        if is_whole and found:
            assert begin <= found[0].begin and found[-1].end <= end, "whole pieces"
        return found

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
