"""The user's weight files, which are only read, and the blocks that are read from them.

The files are a safetensors file, or a directory with one or with shards and their index, as Hugging
Face writes it. As long as no code changes its values, a block is read from there each time and
never copied to a store. It is assembled from ranges of one or several files. The first read takes
the checksums that every later read is compared with. Before and after each read the file is refused
if its size or modification time differs from that at opening, so no read yields bytes of another
file.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offload.core.errors import ConfigError, CorruptionError, FormatError, OffloadError, StoreError
from offload.core.format_limits import MOST_HEADER_BYTES
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.portable import read_json
from offload.core.ticket import Ticket
from offload.core.timeline import DISK_READS, Event
from offload.storage.buffers import Buffer
from offload.storage.choose import open_engine
from offload.storage.direct_file import OpenedFile
from offload.storage.engine import Group, IOEngine, Priority, Sums, Transfer, make_sums
from offload.storage.safetensors_file import Entry, SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights:
    """A set of open weight files. entries: the file and the place of each tensor, by name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"weights: expected a path, got {type(path).__name__}")
        self.path = Path(path)
        self.files: list[SafetensorsFile] = []
        self.entries: dict[str, tuple[SafetensorsFile, Entry]] = {}
        try:
            if self.path.is_dir():
                self._open_directory()
            elif self.path.exists():
                self._open(self.path)
            else:
                raise ConfigError(f"weights: {self.path} does not exist")
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self.files.append(file)
        self.entries |= {name: (file, entry) for name, entry in file.entries.items()}
        return file

    def _open_directory(self) -> None:
        if (self.path / SINGLE).exists():
            self._open(self.path / SINGLE)
            return
        index = self.path / INDEX
        if not index.exists():
            raise ConfigError(
                f"weights: {self.path} has neither {SINGLE} nor {INDEX}; give a safetensors file, "
                "or a directory that save_pretrained has written"
            )
        places = _read_index(index)
        shards = {name: self._open(self.path / name) for name in dict.fromkeys(places.values())}
        missing = [name for name, shard in places.items() if name not in shards[shard].entries]
        if missing:
            raise FormatError(
                f"{index}: names tensors that their files do not have: {', '.join(missing[:20])}"
            )
        self.entries = {
            name: (shards[shard], shards[shard].entries[name]) for name, shard in places.items()
        }
        rest = sum(len(shard.entries) for shard in shards.values()) - len(places)
        if rest:
            LOG.info("weights: %d tensors in %s are not in its index", rest, self.path)

    def close(self) -> None:
        """Close the files. Idempotent. No read may be in flight."""
        for file in self.files:
            file.close()


def _read_index(path: Path) -> dict[str, str]:
    """Read the file name of each tensor's shard. A name that is a path is a `FormatError`, so that
    an index cannot lead out of its directory.
    """
    found: Any = read_json(path, MOST_HEADER_BYTES)
    places = found.get("weight_map") if type(found) is dict else None
    if type(places) is not dict or not places:
        raise FormatError(f"{path}: expected a weight_map of names and files")
    for name, shard in places.items():
        is_name = type(shard) is str and os.path.basename(shard) == shard and "\0" not in shard
        if not is_name or shard in ("", ".", ".."):
            raise FormatError(
                f"{path}: {name!a}: expected the name of a file beside it, got {shard!a}"
            )
    return places


class FileRange(NamedTuple):
    """The bytes [offset, offset + nbytes) of a file, which are at byte `begin` of a block."""

    file: SafetensorsFile
    offset: int
    begin: int
    nbytes: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Read(Group):
    """A read of a block. It succeeds only if the files are unchanged at its end."""

    original: WeightBlock
    memory: Buffer
    begin_s: float = field(default_factory=time.perf_counter)

    def end(self, error: OffloadError | None) -> None:
        self.error = self.original._ended(self, error)


class WeightBlock:
    """A block of weights in its files. Reads may overlap; any thread may start one."""

    def __init__(
        self, name: str, pieces: Sequence[FileRange], engine: IOEngine, metrics: Metrics
    ) -> None:
        self.name, self.engine = name, engine
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self._metrics = metrics
        self._files = list(dict.fromkeys(piece.file for piece in pieces))
        self._extents: list[tuple[OpenedFile, int, int, int]] = [  # offset, place in the block
            (way, at, piece.begin + at - piece.offset, nbytes)
            for piece in pieces
            for way, at, nbytes in piece.file.cut(piece.offset, piece.nbytes)
        ]
        self._sums: list[Sums] | None = None  # checksums of each extent; None: not read yet

    def read(self, memory: Any, priority: Priority = Priority.WAITED_FOR) -> Ticket[None]:
        """Start to fill `memory`, which the caller must not use until the ticket has ended. Raises
        `StoreError` if a file has changed.
        """
        target = Buffer.of(self.name, memory, writable=True)
        for file in self._files:
            file.check_unchanged(self.name)
        sums = self._sums or [make_sums(0, 1)] * len(self._extents)
        ticket: Ticket[None] = Ticket(f"read of {self.name}", self.engine.describe)
        group = _Read(ticket, priority, original=self, memory=target)
        transfers = [
            Transfer(self.name, False, file, offset, target.part(begin, nbytes), known)
            for (file, offset, begin, nbytes), known in zip(self._extents, sums, strict=True)
        ]
        self.engine.submit(group, transfers)
        return ticket

    def _ended(self, read: _Read, error: OffloadError | None) -> OffloadError | None:
        """Return the error that a read ends with: check that the files are unchanged, and take the
        checksums of the first read. Called as `Group.end` is.
        """
        memory, read.memory = read.memory, Buffer(0, 0, None)  # free it, however long `read` lives
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
                "another process wrote to the file: get it again, and prepare the model again",
                errno=error.errno,
                operation="read",
                file=error.file,
                offset_bytes=error.offset_bytes,
                tensor=self.name,
            )
        if error is None:
            if self._sums is None:
                self._sums = [self._sum(memory.part(at, n)) for _, _, at, n in self._extents]
            self._metrics.count("disk_read_bytes", self.nbytes)
            self._metrics.count("original_read_bytes", self.nbytes)  # included in the former
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
    """The user's weight files, and the engine that reads them: `engine`, or one of its own."""

    def __init__(self, weights: Weights, metrics: Metrics, engine: IOEngine | None = None) -> None:
        self.weights = weights
        self._metrics = metrics
        self._own_engine = open_engine([], metrics=metrics) if engine is None else None
        self.engine: IOEngine = engine or self._own_engine  # type: ignore[assignment]
        if self._own_engine is not None:
            weakref.finalize(self, self._own_engine.close).atexit = False  # engines close at exit
        try:
            for file in weights.files:
                if file.is_slow:
                    metrics.fall_back(
                        f"weights {file.label}", "bytes pass through the page cache: no O_DIRECT"
                    )
        except BaseException:
            self.close()
            raise

    def original(self, name: str, pieces: Sequence[FileRange]) -> WeightBlock:
        return WeightBlock(name, pieces, self.engine, self._metrics)

    def close(self) -> None:
        """Close the own engine and the files. Idempotent. A shared engine must be closed before, by
        its owner: while it runs, the files stay open.
        """
        if self._own_engine is not None:
            self._own_engine.close()
        # A file that the kernel may still read stays open until the process ends.
        if self.engine.is_over and self.engine.abandoned_bytes == 0:
            self.weights.close()
