"""Bytes that stay in the files they came in: blocks that nobody changes are read from there each
time, and never written anywhere.

A block is put together from pieces of one file or several. The first read takes the checksums that
every later one is compared with, and a file that has another size or time of change than when it
was opened is refused, before a read and behind it. So nobody gets bytes of another file than the
one that was opened. Large pieces go past the page cache, as far as they are whole blocks of the
drive; their ends do not.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from offload.core.errors import CorruptionError, OffloadError, StoreError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.core.timeline import DISK_READS, Event
from offload.storage.buffers import Buffer
from offload.storage.choose import open_engine
from offload.storage.engine import Group, IOEngine, Priority, Sums, Transfer, make_sums
from offload.storage.safetensors_file import OpenedFile, SafetensorsFile
from offload.storage.weights import Weights

_DIRECT_BYTES = 256 << 10  # of a piece that is worth more than one read


class FileRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, at byte `begin` of a block."""

    file: SafetensorsFile
    offset: int
    begin: int
    nbytes: int


class _Read(Group):
    """One read of an original. It ends well only if the files are still the same."""

    __slots__ = ("begin_s", "memory", "original")

    def __init__(self, original: WeightBlock, memory: Buffer, priority: Priority) -> None:
        what = f"read of {original.name}"
        super().__init__(Ticket(what, original.engine.describe), priority)
        self.original, self.memory = original, memory
        self.begin_s = time.perf_counter()

    def end(self, error: OffloadError | None) -> None:
        self.error = self.original._ended(self, error)


class WeightBlock:
    """A block in its files. Reads may overlap; any thread."""

    def __init__(
        self, name: str, pieces: Sequence[FileRange], engine: IOEngine, metrics: Metrics
    ) -> None:
        self.name, self.engine = name, engine
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self._metrics = metrics
        self._files = list(dict.fromkeys(piece.file for piece in pieces))
        self._extents = [extent for piece in pieces for extent in _cut(piece)]
        self._sums: list[Sums] | None = None  # of each extent; None: not read yet

    def read(self, memory: Any, priority: Priority = Priority.WAITED_FOR) -> Ticket[None]:
        """Start to fill `memory`, which belongs to the read until its ticket has ended. Raises
        `StoreError` where a file has changed.
        """
        target = Buffer.of(self.name, memory, writable=True)
        for file in self._files:
            file.check_unchanged(self.name)
        sums = self._sums or [make_sums(0, 1)] * len(self._extents)
        group = _Read(self, target, priority)
        transfers = [
            Transfer(self.name, False, file, offset, target.part(begin, nbytes), known)
            for (file, offset, begin, nbytes), known in zip(self._extents, sums, strict=True)
        ]
        self.engine.submit(group, transfers)
        return group.ticket

    def _ended(self, read: _Read, error: OffloadError | None) -> OffloadError | None:
        """What a read ends with; in a thread of the engine's."""
        memory, read.memory = read.memory, Buffer(0, 0, None)  # however long the ticket is kept
        try:
            if error is None or isinstance(error, CorruptionError):
                for file in self._files:
                    file.check_unchanged(self.name)
        except StoreError as changed:
            return changed
        if isinstance(error, CorruptionError):
            return CorruptionError(
                f"{self.name}: {error.file} gave other bytes than when it was read first, and its "
                "size and time of change are the same; the drive or the memory is faulty, or "
                "somebody wrote to the file: get it again, and prepare the model again",
                errno=error.errno,
                operation="read",
                file=error.file,
                offset_bytes=error.offset_bytes,
                tensor=self.name,
            )
        if error is None:
            if self._sums is None:
                self._sums = [self._sum(memory.part(e.begin, e.nbytes)) for e in self._extents]
            self._metrics.count("disk_read_bytes", self.nbytes)
            self._metrics.count("original_read_bytes", self.nbytes)  # among them
            now_s = time.perf_counter()
            self._metrics.event(Event(DISK_READS, self.name, read.begin_s, now_s, self.nbytes))
        return error

    def _sum(self, memory: Buffer) -> Sums:
        sum_bytes = self.engine.sum_bytes
        sums = make_sums(memory.nbytes, sum_bytes)
        for number in range(len(sums)):
            begin = number * sum_bytes
            part = memory.part(begin, min(sum_bytes, memory.nbytes - begin))
            sums[number] = self.engine.sum_of(part)
        return sums


class WeightBlocks:
    """The files that weights came in, and an engine to read them: `engine`, or one of its own."""

    def __init__(self, weights: Weights, metrics: Metrics, engine: IOEngine | None = None) -> None:
        self.weights = weights
        self._metrics = metrics
        self._own_engine = open_engine([], metrics=metrics) if engine is None else None
        self.engine: IOEngine = engine or self._own_engine  # type: ignore[assignment]
        if self._own_engine is not None:
            weakref.finalize(self, self._own_engine.close).atexit = False  # engines have their own
        try:
            for file in weights.files:
                if file.direct is None and file.nbytes >= _DIRECT_BYTES:
                    metrics.fall_back(
                        f"weights {file.label}", "bytes pass through the page cache: no O_DIRECT"
                    )
        except BaseException:
            self.close()
            raise

    def original(self, name: str, pieces: Sequence[FileRange]) -> WeightBlock:
        return WeightBlock(name, pieces, self.engine, self._metrics)

    def close(self) -> None:
        """Behind the engine's owner, if that is somebody else. Idempotent."""
        if self._own_engine is not None:
            self._own_engine.close()
        # A file that the kernel may still use stays open until the end.
        if self.engine.is_over and self.engine.abandoned_bytes == 0:
            self.weights.close()


class _FileExtent(NamedTuple):
    file: OpenedFile
    offset: int
    begin: int
    nbytes: int


def _cut(piece: FileRange) -> Iterator[_FileExtent]:
    """A piece as whole blocks of the drive, and what is before and behind them."""
    end = piece.offset + piece.nbytes
    first = last = end
    direct = piece.file.direct
    if direct is not None and piece.nbytes >= _DIRECT_BYTES:
        first = -(-piece.offset // direct.align) * direct.align
        last = max(first, end // direct.align * direct.align)
    bounds = [(piece.offset, first, False), (first, last, True), (last, end, False)]
    for begin, stop, is_direct in bounds:
        if stop > begin:
            file = direct if is_direct and direct is not None else piece.file.buffered
            yield _FileExtent(file, begin, piece.begin + begin - piece.offset, stop - begin)
