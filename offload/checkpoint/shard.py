"""One safetensors file of a checkpoint while it is written.

Tensors are written in any order and in pieces; every byte is written once. A piece lies where the
header says, which is seldom at a block boundary of the disk. Whole blocks in it are written from
buffers of the output; a block that it shares with other pieces is kept until these are written,
too, and then goes to the disk once. So no block is ever read, changed and written again, and
everything is written with direct I/O.

Where several ranks write one file, each has bytes of its own. A block in which other ranks have
bytes, too, goes through the page cache, byte for byte: the kernel merges them. No such block is
ever written past the cache.

A piece, or each PART_BYTES of a long one, becomes a part in the manifest with its own checksum,
computed from the very bytes that are given to the disk.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from offload.checkpoint.format.manifest import CheckedPart, SavedTensor, crc32
from offload.checkpoint.output import Output, OutputFile
from offload.checkpoint.rank_group import Range, merged_ranges, within
from offload.core.errors import ConfigError, StateError
from offload.storage.buffers import Buffer
from offload.storage.safetensors_header import TensorPlace

PART_BYTES = 16 << 20


@dataclass
class _TensorRange:
    """A range [begin, end) of a tensor's bytes that has a writer. crc32: negative until they are
    copied.
    """

    begin: int
    end: int
    crc32: int = -1


@dataclass
class _PartialBlock:
    """A block of the file that does not have all of its bytes yet."""

    data: bytearray
    nbytes: int = 0  # how many of its bytes are there


class Shard:
    """A file of `section` that is being written. Any thread may call `write`.

    header: its bytes, on the first rank, which writes them; nothing on other ranks. own: the bytes
    of each tensor that this rank writes.
    """

    def __init__(
        self,
        output: Output,
        file: OutputFile,
        name: str,
        nbytes: int,
        header: bytes,
        places: Mapping[str, TensorPlace],
        own: Mapping[str, Sequence[Range]],
    ) -> None:
        self.file, self.name, self.nbytes, self.own = file, name, nbytes, own
        self.section = name.rpartition("-")[0]
        self._output, self._places = output, places
        self._own_in_file = merged_ranges(
            [(0, len(header))]
            + [(p.offset + a, p.offset + b) for key, p in places.items() for a, b in own[key]]
        )
        self._pieces: dict[str, list[_TensorRange]] = {key: [] for key in places}
        self._blocks: dict[int, _PartialBlock] = {}
        self._lock = threading.Lock()
        label = f"header of {name}"
        self._put(label, Buffer.of(label, header, writable=False), 0)

    # --- writing ----------------------------------------------------------------------------------

    def write(self, name: str, begin_bytes: int, data: Any) -> None:
        """Write `data` as the bytes of tensor `name` from `begin_bytes` on. data: a contiguous host
        tensor, or any object that shows its bytes; the caller may change it when this returns. Each
        byte is written once. Bytes that other ranks write are left out.

        Raises the first error of any earlier write of this checkpoint. May block until a buffer is
        free.
        """
        place = self._places.get(name)
        if place is None:
            raise ConfigError(f"{self.name}: has no tensor {name!r}; open_shard names them all")
        source = Buffer.of(name, data, writable=False)
        if not isinstance(begin_bytes, int) or begin_bytes < 0:
            raise ConfigError(f"{name}: begin_bytes: expected 0 or more, got {begin_bytes!r}")
        if begin_bytes + source.nbytes > place.nbytes:
            raise ConfigError(
                f"{name}: expected at most {place.nbytes} bytes, as {place.dtype} of shape "
                f"{list(place.shape)} has; got {source.nbytes} from {begin_bytes} on"
            )
        self._output.check()
        label = f"{self.section}/{name}"
        for begin, end in within(self.own[name], begin_bytes, begin_bytes + source.nbytes):
            bounds = itertools.pairwise([*range(begin, end, PART_BYTES), end])
            for piece in self._claim(name, [_TensorRange(a, b) for a, b in bounds]):
                part = source.part(piece.begin - begin_bytes, piece.end - piece.begin)
                piece.crc32 = self._put(label, part, place.offset + piece.begin)

    def _claim(self, name: str, fresh: list[_TensorRange]) -> list[_TensorRange]:
        """Claim the bytes of pieces that touch each other, so that the caller alone writes them."""
        begin, end = fresh[0].begin, fresh[-1].end
        with self._lock:
            pieces = self._pieces[name]
            at = bisect.bisect_left(pieces, begin, key=attrgetter("begin"))
            for other in pieces[max(0, at - 1) : at + 1]:
                if other.end > begin and other.begin < end:
                    byte = max(begin, other.begin)
                    raise StateError(f"{name}: byte {byte} was written before; each comes once")
            pieces[at:at] = fresh
        return fresh

    def _put(self, label: str, source: Buffer, offset: int) -> int:
        """Copy bytes that belong at `offset` of the file, and start to write each block that is
        complete; return their CRC.
        """
        block_bytes, each_bytes = self.file.block_bytes, self._output.each_bytes
        crc, at = 0, 0
        while at < source.nbytes:
            here, left = offset + at, source.nbytes - at
            if here % block_bytes or left < block_bytes:
                nbytes = min(block_bytes - here % block_bytes, left)
                crc = self._put_broken(label, source.part(at, nbytes), here, crc)
            else:
                nbytes = min(left, each_bytes) // block_bytes * block_bytes
                crc = self._put_whole(label, source.part(at, nbytes), here, crc)
            at += nbytes
        return crc

    def _put_whole(self, label: str, source: Buffer, offset: int, crc: int) -> int:
        buffer = self._output.take_buffer()
        try:
            ctypes.memmove(buffer.address, source.address, source.nbytes)
            crc = crc32(buffer.part(0, source.nbytes).view(), crc)
        except BaseException:
            self._output.give_back(buffer)
            raise
        self._output.start(label, self.file, offset, buffer, source.nbytes)
        return crc

    def _put_broken(self, label: str, source: Buffer, offset: int, crc: int) -> int:
        """Copy bytes that lie within one block, and write the block once it is complete."""
        block_bytes = self.file.block_bytes
        number, begin = divmod(offset, block_bytes)
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = _PartialBlock(bytearray(block_bytes))
        there = memoryview(block.data)[begin : begin + source.nbytes]
        there[:] = source.view()
        crc = crc32(there, crc)
        first = number * block_bytes
        own = within(self._own_in_file, first, first + block_bytes)
        needed = sum(last - begin for begin, last in own)
        with self._lock:
            block.nbytes += source.nbytes
            is_whole = block.nbytes == needed
            if is_whole:
                del self._blocks[number]
        if not is_whole:
            return crc
        if needed == min(block_bytes, self.nbytes - first):
            # The file's last block is padded; `commit` truncates the file to its length.
            self._put_whole(label, Buffer.of(label, block.data, writable=False), first, 0)
        else:  # other ranks have bytes in it, too
            self._output.put_ranges(self.file, first, block.data, own)
        return crc

    # --- the end ----------------------------------------------------------------------------------

    def pieces(self) -> dict[str, list[list[int]]]:
        """Return begin, end and CRC-32 of each piece that was written here, by tensor. Raises
        `StateError` while some of this rank's bytes are missing.
        """
        with self._lock:
            for name, own in self.own.items():
                pieces = self._pieces[name]
                copied = merged_ranges((p.begin, p.end) for p in pieces if p.crc32 >= 0)
                for begin, end in own:
                    here = within(copied, begin, end)
                    if here != [(begin, end)]:
                        byte = here[0][1] if here and here[0][0] == begin else begin
                        raise StateError(
                            f"{self.section}/{name}: byte {byte} of {self._places[name].nbytes} "
                            "was never written; write all of it before commit"
                        )
            return {
                name: [[p.begin, p.end, p.crc32] for p in pieces]
                for name, pieces in self._pieces.items()
                if pieces
            }

    def take_in(self, pieces: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Add the pieces that another rank has written. Raises `StateError` if a byte was written
        before.
        """
        for name, each in pieces.items():
            for begin, end, crc in each:
                self._claim(name, [_TensorRange(begin, end, crc)])

    def saved(self) -> list[SavedTensor]:
        """Return the tensors for the manifest, once all pieces are there."""
        found = []
        for name, place in self._places.items():
            parts = [
                CheckedPart(self.name, place.offset + p.begin, p.end - p.begin, p.crc32)
                for p in self._pieces[name]
            ] or [CheckedPart(self.name, place.offset, 0, 0)]
            full = f"{self.section}/{name}"
            found.append(SavedTensor(full, place.dtype, tuple(place.shape), tuple(parts)))
        return found


class Shards:
    """The shards of one section, in which each tensor lies in one of them."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shard_of = {name: shard for shard in shards for name in shard.own}

    def write(self, name: str, begin_bytes: int, data: Any) -> None:
        """See `Shard.write`."""
        self._shard_of[name].write(name, begin_bytes, data)

    def wants(self, name: str, begin_bytes: int, end_bytes: int) -> bool:
        """Return whether this rank writes any of these bytes of tensor `name`."""
        return bool(within(self._shard_of[name].own[name], begin_bytes, end_bytes))
