"""The staging memory of spilled gradients, divided into slots."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from offload.core.errors import OffloadError, StoreTimeout
from offload.core.ticket import Ticket
from offload.planning.layout import Chunk

_PAGE = 4096
_LINE = 64


@dataclass(eq=False)
class SpillSlot:
    """A slot of the staging buffer, for one range or for the slices of one chunk of state."""

    memory: Tensor  # bytes
    tickets: list[Ticket[None]] = field(default_factory=list)  # transfers that may touch it
    is_lost: bool = False  # after a timeout the operating system may still write to it
    is_staged: bool = False  # the update or an accumulation uses it
    is_written: bool = False  # a write from it has not been taken in

    @property
    def is_free(self) -> bool:
        is_taken = self.is_lost or self.is_staged or self.is_written
        return not is_taken and all(ticket.done for ticket in self.tickets)

    def start(self, ticket: Ticket[None]) -> Ticket[None]:
        self.tickets = [one for one in self.tickets if not one.done] + [ticket]
        return ticket


class SpillSlots:
    """The slots of one staging buffer, which they divide into whole pages. One thread at a time."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._lost: list[Tensor] = []  # memory that the operating system may write to at any time
        self.each: list[SpillSlot] = []
        if memory.nbytes:
            self.divide(_PAGE)

    def divide(self, slot_bytes: int) -> None:
        """Divide the buffer into slots of `slot_bytes`, or into one if it is smaller."""
        slot_bytes = min(page_up(max(slot_bytes, 1)), self._memory.nbytes)
        begins = range(0, self._memory.nbytes - slot_bytes + 1, slot_bytes or 1)
        self.each = [SpillSlot(self._memory[begin : begin + slot_bytes]) for begin in begins]
        for slot in self.each:
            slot.is_lost = any(_overlap(slot.memory, lost) for lost in self._lost)

    @property
    def slot_bytes(self) -> int:
        return self.each[0].memory.nbytes if self.each else 0

    @property
    def are_staged(self) -> bool:
        return any(slot.is_staged for slot in self.each)

    def free(self) -> SpillSlot | None:
        return next((slot for slot in self.each if slot.is_free), None)

    def lose_after(self, slot: SpillSlot, error: OffloadError) -> None:
        """Mark a slot as lost if its transfer ended with a timeout: the operating system may still
        touch the memory.
        """
        if isinstance(error, StoreTimeout) and error.errno == errno.ETIMEDOUT:
            slot.is_lost = True
            self._lost.append(slot.memory)

    def recover(self) -> None:
        """Recover the lost slots: the drive has answered after all."""
        if self._lost:
            self._lost.clear()
            for slot in self.each:
                slot.is_lost = False


def page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


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


def round_up_to_cache_line(nbytes: int) -> int:
    """Round up to the distance between slices of a chunk in a slot: whole cache lines."""
    return -(-nbytes // _LINE) * _LINE
