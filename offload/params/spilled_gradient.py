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
from offload.params.spill import SpillArea, SpilledRange
from offload.params.spill_slots import SpillSlot
from offload.storage.engine import Priority

_READING = "gradient read"  # name of the wait in metrics


class StagedGradientRange:
    """A range that is being read into memory; its values are valid once `wait` has returned."""

    def __init__(
        self,
        whose: SpilledGradientValues,
        piece: SpilledRange,
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
                self._whose.area.slots.lose_after(self._slot, error)
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
        self._edits: list[
            tuple[int, int, GradientEdit]
        ] = []  # elements [begin, end), and their edit
        self._norm: Tensor | None = None
        self._squares: Sequence[float] | None = None
        self.error: OffloadError | None = None  # of a write that failed: some values are lost

    @classmethod
    def make(
        cls,
        area: SpillArea,
        key: object,
        name: str,
        numel: int,
        dtype: torch.dtype,
        shape: torch.Size,
    ) -> SpilledGradientValues | None:
        """Make a spilled gradient, without values yet. Return None if the area has no room."""
        with area.lock:
            room = area.reserve(key, numel, dtype)
            if room is None:
                return None
            number, cuts, nbytes = room
            made = cls(area, number, name, cuts, dtype, shape)
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
        cuts = self.area.fitting(self.cuts, self.dtype)
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
                here = self._in(slot, piece)
                here.copy_(values[piece.begin - begin : piece.end - begin])
                self._store(piece, here, slot)
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
            try:
                while to_come or coming:
                    while to_come and (not coming or self.area.has_free()):
                        coming.append(self._stage(to_come.popleft()))
                    staged, slot = coming[0]
                    staged.wait()
                    piece = staged.piece
                    staged.values.add_(flat[piece.begin - begin : piece.end - begin])
                    self._store(piece, staged.values, slot)
                    slot.is_staged = False
                    coming.popleft()
            finally:
                for staged, slot in coming:
                    staged.break_off()
                    slot.is_staged = False
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

    def _stage(self, piece: SpilledRange) -> tuple[StagedGradientRange, SpillSlot]:
        """Begin to read a range into a free slot."""
        slot = self.area.take()
        staged = StagedGradientRange(self, piece, self._in(slot, piece), slot)
        slot.is_staged = True
        return staged, slot

    def _store(self, piece: SpilledRange, values: Tensor, slot: SpillSlot) -> None:
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

    def _make_edits(self, piece: SpilledRange, values: Tensor) -> None:
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
        self, piece: SpilledRange, values: Tensor, slot: SpillSlot | None
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

    def _is_blank(self, piece: SpilledRange) -> bool:
        """Return whether an edit replaces the stored values of the range without reading them."""
        return any(
            edit.is_blank and begin <= piece.begin and piece.end <= end
            for begin, end, edit in self._edits[piece.made :]
        )

    def _in(self, slot: SpillSlot, piece: SpilledRange) -> Tensor:
        return slot.memory.view(self.dtype)[: piece.end - piece.begin]

    def _within(self, begin: int, end: int) -> list[SpilledRange]:
        found = self._around(begin, end)
        assert not found or (found[0].begin >= begin and found[-1].end <= end), "whole pieces"
        return found

    def _around(self, begin: int, end: int) -> list[SpilledRange]:
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
