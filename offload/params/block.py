"""A unit's parameters as one piece of bytes, and where they are.

A block's place in host memory is in one state of the table below; what is not there is in the
store. Its bytes are the truth in host memory until the store has them, too. Its place on a device
has a state of its own, by the same table: a copy to compute with, which is never written back.

Of a block that is shared out over ranks, host memory and the store have this rank's slice only; the
copy to compute with is gathered from all of them, and its state is that of one on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from offload.core.ticket import Ticket
from offload.distributed.partition import Partition
from offload.planning.unit import Member, Unit


class Presence(Enum):
    """Of a block in host memory, or on a device."""

    AWAY = "away"  # no memory
    COMING = "coming"  # has memory, which is being filled
    HERE = "here"


MOVES = {
    Presence.AWAY: {Presence.COMING, Presence.HERE},
    Presence.COMING: {Presence.HERE, Presence.AWAY},
    Presence.HERE: {Presence.AWAY},
}


@dataclass(eq=False)
class Block:
    """The parameters that a unit owns. One thread at a time."""

    unit: Unit
    in_host: Presence = Presence.AWAY
    memory: Tensor | None = None  # host bytes; None: away
    reading: Ticket[None] | None = None  # until somebody has waited for it
    writing: Ticket[None] | None = None
    is_stored: bool = False  # the store has these very bytes
    is_attached: bool = False  # the parameters are seen with their values
    pins: int = 0  # users who rely on its being attached
    runs: int = 0  # of these, units that run: they can ask again
    runner: int | None = None  # the thread in which they run; None: none, or more than one
    generation: int = 0  # counts the changes of its values
    version: int = 0  # of its parameters, as torch counts, when their values were last known
    seen: int | None = None  # checksum of what is attached, when others could last change it
    on_device: Presence = Presence.AWAY
    device_pins: int = 0  # users who rely on its being on the device
    slices: Partition | None = None  # None: all of it is ours
    rank: int = 0  # whose slice it is

    @property
    def number(self) -> int:
        return self.unit.number

    @property
    def nbytes(self) -> int:
        """Of what is in host memory and in the store."""
        return self.unit.nbytes if self.slices is None else self.slices.slice_bytes

    @property
    def whole_bytes(self) -> int:
        """Of the copy to compute with, padding included."""
        return self.unit.nbytes if self.slices is None else self.slices.padded_bytes

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the unit that lie in host memory and in the store."""
        return (0, self.unit.nbytes) if self.slices is None else self.slices.span(self.rank)

    @property
    def name(self) -> str:
        return self.unit.name

    def move_in_host(self, presence: Presence) -> None:
        assert presence in MOVES[self.in_host], f"{self.name}: {self.in_host} -> {presence}"
        self.in_host = presence

    def move_on_device(self, presence: Presence) -> None:
        assert presence in MOVES[self.on_device], f"{self.name}: {self.on_device} -> {presence}"
        self.on_device = presence

    def strangers(self, begin: int) -> list[Member]:
        """Parameters that are not what they are in the copy of the block that begins there."""
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
        return sum(member.param._version for member in self.unit.members)

    def views(self, memory: Tensor) -> Iterator[tuple[Member, Tensor]]:
        """Each parameter's values in a copy of the block."""
        for member in self.unit.members:
            values = memory[member.begin : member.begin + member.nbytes].view(member.dtype)
            yield member, values.view(member.shape)


def pin(blocks: Iterable[Block]) -> None:
    """They stay in host memory, once they are there, until `unpin`."""
    for block in blocks:
        block.pins += 1


def unpin(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.pins -= 1
        assert block.pins >= 0, f"{block.name}: done more often than used"


@contextmanager
def pinned(blocks: Sequence[Block], lock: threading.RLock) -> Iterator[None]:
    """Pinned inside. lock: that of the blocks; it is not held inside."""
    with lock:
        pin(blocks)
    try:
        yield
    finally:
        with lock:
            unpin(blocks)


class DevicePins:
    """Blocks that somebody relies on where they are computed with. The lock is theirs."""

    _lock: threading.RLock

    def pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.device_pins += 1

    def unpin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.device_pins -= 1
            assert block.device_pins >= 0, f"{block.name}: done more often than used"

    @contextmanager
    def pinned(self, blocks: Sequence[Block]) -> Iterator[None]:
        with self._lock:
            self.pin(blocks)
        try:
            yield
        finally:
            with self._lock:
                self.unpin(blocks)


@dataclass(frozen=True)
class Reference:
    """A tensor that lies in a block, without its memory: where, and what it looks like."""

    block: Block
    generation: int
    dtype: torch.dtype
    begin: int  # its first byte in the block
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def to(cls, block: Block, tensor: Tensor) -> Reference:
        return cls(
            block,
            block.generation,
            tensor.dtype,
            int(tensor.storage_offset()) * tensor.element_size(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, memory: Tensor) -> Tensor:
        """The tensor again, in the block's bytes of today."""
        values = memory[self.begin :]
        values = values[: values.numel() // self.dtype.itemsize * self.dtype.itemsize]
        found = values.view(self.dtype).as_strided(self.size, self.stride)
        if self.is_conj:
            found = found.conj()
        return torch._neg_view(found) if self.is_neg else found
