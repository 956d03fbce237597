"""A unit's parameters as one run of bytes, and which tiers hold them.

A block's memory in host memory is in one state of the table below; a block without any is in the
store. Until the store has the same bytes, the bytes in host memory are the only valid ones. Its
memory on a device has a state of its own, by the same table: a copy to compute with, which is never
written back.

Host memory and the store have only this rank's shard of a block that is sharded over ranks; the
copy to compute with is all-gathered from all of them, and the state of that copy is the one that a
device copy would have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from offload.core.ticket import Ticket
from offload.distributed.placing import Partition
from offload.params.placeholder import restore
from offload.planning.unit import Member, Unit

KEY = "parameters "  # how the names of blocks begin in a store


class Presence(Enum):
    """The state of a block's memory, in host memory or on a device."""

    AWAY = "away"  # no memory
    COMING = "coming"  # has memory, and a fetch fills it
    HERE = "here"


MOVES = {
    Presence.AWAY: {Presence.COMING, Presence.HERE},
    Presence.COMING: {Presence.HERE, Presence.AWAY},
    Presence.HERE: {Presence.AWAY},
}


@dataclass(eq=False)
class Block:
    """The parameters that a unit owns, and their state in each tier. One thread at a time."""

    unit: Unit
    in_host: Presence = Presence.AWAY
    memory: Tensor | None = None  # host bytes; None: not in host memory
    reading: Ticket[None] | None = None  # until a thread has waited for it
    writing: Ticket[None] | None = None
    # Waits until nothing reads its host memory for the copy to compute with; None: nothing does.
    copying: Callable[[], None] | None = None
    is_stored: bool = False  # the store has these very bytes
    is_attached: bool = False  # the parameters show their values
    pins: int = 0  # users that rely on its being attached
    runs: int = 0  # of these, units that run: they can fetch it again
    runner: int | None = None  # the thread in which they run; None: none, or more than one
    generation: int = 0  # counts the changes of its values
    version: int = 0  # sum of its parameters' torch versions when their values were last known
    seen: int | None = None  # checksum of what is attached, when user code could last change it
    on_device: Presence = Presence.AWAY
    device_pins: int = 0  # users that rely on its being on the device
    partition: Partition | None = None  # None: this rank has the whole block
    rank: int = 0  # whose shard it is
    number: int = field(init=False)
    name: str = field(init=False)
    key: str = field(init=False)  # its name in a store
    nbytes: int = field(init=False)  # in host memory and in the store
    whole_bytes: int = field(init=False)  # of the copy to compute with, padding included
    span: tuple[int, int] = field(init=False)  # bytes of the unit that host memory and store have

    def __post_init__(self) -> None:
        self.number, self.name = self.unit.number, self.unit.name
        self.key = f"{KEY}{self.number}: {self.name}"
        self.nbytes = self.whole_bytes = self.unit.nbytes
        self.span = 0, self.unit.nbytes
        if self.partition is not None:
            self.nbytes, self.whole_bytes = self.partition.shard_bytes, self.partition.padded_bytes
            self.span = self.partition.span(self.rank)

    @property
    def is_here(self) -> bool:
        """Whether memory or the store has the block's values, or this rank's part of them."""
        return self.in_host is not Presence.AWAY or self.is_stored

    def move_in_host(self, presence: Presence) -> None:
        assert presence in MOVES[self.in_host], f"{self.name}: {self.in_host} -> {presence}"
        self.in_host = presence

    def move_on_device(self, presence: Presence) -> None:
        assert presence in MOVES[self.on_device], f"{self.name}: {self.on_device} -> {presence}"
        self.on_device = presence

    def strangers(self, begin: int) -> list[Member]:
        """List the parameters that are no plain views of the copy of the block that begins at
        address `begin`: other memory, dtype, shape or strides.
        """
        return [
            m
            for m in self.unit.members
            if (m.nbytes and m.param.data_ptr() != begin + m.begin)
            or m.param.dtype != m.dtype
            or m.param.shape != m.shape
            or m.param.stride() != m.stride
            or m.param.is_conj()
            or m.param.is_neg()
        ]

    @property
    def version_now(self) -> int:
        """The sum of torch's version counters, which grows with every write in place."""
        return sum(member.param._version for member in self.unit.members)

    def views(self, memory: Tensor) -> Iterator[tuple[Member, Tensor]]:
        """Yield each parameter with its values in `memory`, a copy of the block."""
        for member in self.unit.members:
            values = memory[member.begin : member.begin + member.nbytes].view(member.dtype)
            yield member, values.view(member.shape)

    def show(self, memory: Tensor) -> None:
        """Restore the parameters: their values are those in `memory`, a copy of the block."""
        for member, values in self.views(memory):
            restore(member.param, values)


def pin(blocks: Iterable[Block], change: int = 1) -> None:
    """Keep the blocks in host memory, once they are resident. change: 1, or -1 to undo that."""
    for block in blocks:
        block.pins += change
        assert block.pins >= 0, f"{block.name}: done more often than used"


def pin_on_device(blocks: Iterable[Block], change: int) -> None:
    """Keep the copies of the blocks to compute with. change: 1, or -1 to undo that."""
    for block in blocks:
        block.device_pins += change
        assert block.device_pins >= 0, f"{block.name}: done more often than used"


@contextmanager
def pinned(
    blocks: Sequence[Block],
    lock: threading.RLock,
    pin: Callable[[Sequence[Block], int], None] = pin,
) -> Iterator[None]:
    """Keep the blocks pinned by `pin` inside the `with`. lock: that of the blocks; not held
    inside.
    """
    with lock:
        pin(blocks, 1)
    try:
        yield
    finally:
        with lock:
            pin(blocks, -1)


class Reference:
    """A reference to a tensor that lies in a block, without its memory: place and layout."""

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self.block, self.generation = block, block.generation
        self._dtype, self._size, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        # Its first byte in the block.
        self._begin = int(tensor.storage_offset()) * tensor.element_size()
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()

    def view(self, memory: Tensor) -> Tensor:
        """Rebuild the tensor from the block's present bytes."""
        values = memory[self._begin :]
        values = values[: values.numel() // self._dtype.itemsize * self._dtype.itemsize]
        found = values.view(self._dtype).as_strided(self._size, self._stride)
        if self._is_conj:
            found = found.conj()
        return torch._neg_view(found) if self._is_neg else found
