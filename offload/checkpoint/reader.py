"""A checkpoint open for reading: nothing in it is trusted, and no byte passes unchecked.

The manifest says which bytes belong to which tensor, and has a checksum for each part of them.
`check` compares all of it in one pass over the files; reads of single tensors compare again what
they read whole. Bytes are read from the drive, not from the page cache, where the file system
allows.

An open reader holds a shared lock on the directory, so that no save removes it as too old.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any

from offload.checkpoint.format.directory import CheckpointDirectory, read_into
from offload.checkpoint.format.manifest import CheckedPart, Manifest, SavedTensor, crc32
from offload.checkpoint.output import IoBuffers
from offload.checkpoint.rank_group import share_of
from offload.core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    OffloadError,
    StoreTimeout,
)
from offload.core.metrics import Metrics
from offload.core.portable import close_fds, drop_cached
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.choose import open_engine
from offload.storage.direct_file import DirectFile
from offload.storage.engine import Group, IOEngine, Priority, Transfer, make_sums
from offload.storage.safetensors_file import DTYPES
from offload.storage.safetensors_header import build_header

_BUFFER_BYTES = 4 << 20
_BUFFERS = 8


class CheckpointReader:
    """A checkpoint open for reading, until `close`; also a context manager. Any thread may use it.

    Raises `FormatError`, `CorruptionError` or `StoreError` if `path` is no checkpoint, or not
    whole. engine: to read with; otherwise the reader opens its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        metrics: Metrics | None = None,
        engine: IOEngine | None = None,
    ) -> None:
        self._fds: list[int] = []
        self._metrics = metrics or Metrics()
        self._directory = CheckpointDirectory(path)
        self.path = self._directory.path
        self._own_engine: IOEngine | None = None
        try:
            self._directory.try_lock(shared=True)
            self.manifest: Manifest = self._directory.read_manifest()
            self._files = {
                name: self._open(name, nbytes) for name, nbytes in self.manifest.files.items()
            }
            if engine is None:
                engine = self._own_engine = open_engine([], metrics=self._metrics)
        except BaseException:
            _close(os.getpid(), self._own_engine, self._fds, self._directory)
            raise
        self._engine = engine
        self._finish = weakref.finalize(
            self, _close, os.getpid(), self._own_engine, self._fds, self._directory
        )

    def _open(self, name: str, nbytes: int) -> DirectFile:
        self._fds.append(self._directory.open(name))
        file = DirectFile(self.path / name, self._fds, "load again")
        if file.nbytes != nbytes:
            raise FormatError(f"{file.path}: has {file.nbytes} bytes, expected {nbytes}")
        return file

    def tensor(self, name: str) -> SavedTensorSource:
        """Return a tensor by its name in the manifest, `section/name`."""
        saved = self.manifest.tensors.get(name)
        if saved is None:
            raise ConfigError(f"{self.path}: has no tensor {name!r}")
        return SavedTensorSource(self, saved)

    # --- everything -------------------------------------------------------------------------------

    def check(
        self,
        buffers: IoBuffers | None = None,
        before_part: Callable[[], None] = lambda: None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Compare every byte with its checksum, and every header with the manifest.

        Raises `CorruptionError` or `FormatError` for the first thing that is wrong. buffers: memory
        to read through, 32 MiB of its own otherwise. before_part: called before each part; may end
        the check with an error. share: a rank and the number of ranks; what this rank leaves out is
        for the other ranks to check.
        """
        buffers = buffers or IoBuffers(_BUFFER_BYTES, _BUFFERS)
        tensors = self.manifest.by_file()
        sizes = [p.nbytes for each in tensors.values() for tensor in each for p in tensor.parts]
        mine, before = share_of(sizes, *share), 0
        for name, file in self._files.items():
            parts = [(tensor, part) for tensor in tensors[name] for part in tensor.parts]
            own = parts[max(0, mine.start - before) : max(0, mine.stop - before)]
            before += len(parts)
            with suppress(OSError):  # so that the next read through it is from the drive
                drop_cached(file.buffered.fd, 0, 0)
            if own or share[0] == 0:
                self._check_header(file, tensors[name])
                self._check_data(file, own, buffers, before_part)

    def _check_header(self, file: DirectFile, tensors: list[SavedTensor]) -> None:
        """Check that the header is, byte for byte, the one that these tensors require."""
        expected, _ = build_header([tensor.spec for tensor in tensors])
        found = bytearray(len(expected))
        read_into(file.buffered.fd, 0, found, file.path)
        if found != expected:
            raise CorruptionError(
                f"{file.path}: its header is not the one that was saved; take another checkpoint, "
                "and see dmesg and smartctl about the drive",
                errno=errno.EBADMSG,
                operation="read",
                file=str(file.path),
                offset_bytes=0,
            )

    def _check_data(
        self,
        file: DirectFile,
        parts: list[tuple[SavedTensor, CheckedPart]],
        buffers: IoBuffers,
        before_part: Callable[[], None],
    ) -> None:
        begin = parts[0][1].offset if parts else file.nbytes
        nbytes = sum(part.nbytes for _, part in parts)
        view = memoryview(b"")
        with closing(self._read_ahead(file, begin, begin + nbytes, buffers)) as pieces:
            for tensor, part in parts:
                before_part()
                crc, left = 0, part.nbytes
                while left:
                    view = view or next(pieces)
                    some = view[:left]
                    crc = crc32(some, crc)
                    view, left = view[len(some) :], left - len(some)
                if crc != part.crc32:
                    raise _mismatch(file, tensor, part, crc)
        file.check_unchanged(file.path.name)
        self._metrics.count("checkpoint_checked_bytes", nbytes)

    def _read_ahead(
        self, file: DirectFile, at: int, end: int, buffers: IoBuffers
    ) -> Generator[memoryview]:
        """Yield the bytes of a file from `at` to `end`, some reads ahead. Each piece is valid until
        the next one is requested.
        """
        ahead: deque[tuple[Ticket[None], Buffer, int]] = deque()
        size = buffers.each_bytes
        try:
            while ahead or at < end:
                while at < end and buffers.free:
                    buffer = buffers.free.pop()
                    nbytes = min(size - at % size, end - at)  # so that later ones begin at blocks
                    memory, name = buffer.part(0, nbytes), file.path.name
                    ticket = self._start(Priority.PREFETCH, name, file, at, memory)
                    ahead.append((ticket, buffer, nbytes))
                    at += nbytes
                ticket, buffer, nbytes = ahead.popleft()
                ticket.wait()
                try:
                    yield buffer.part(0, nbytes).view()
                finally:
                    buffers.free.append(buffer)
        finally:  # whether or not they succeed
            for ticket, buffer, _ in ahead:
                try:
                    ticket.wait()
                except OffloadError as error:
                    if isinstance(error, StoreTimeout):  # the kernel may still write to it
                        continue
                buffers.free.append(buffer)

    def _start(
        self, priority: Priority, name: str, file: DirectFile, offset: int, memory: Buffer
    ) -> Ticket[None]:
        """Start to fill `memory` with the bytes of the file from `offset` on. name: for errors."""
        transfers = [
            Transfer(name, False, way, at, memory.part(at - offset, nbytes), make_sums(0, 1))
            for way, at, nbytes in file.cut(offset, memory.nbytes)
        ]
        ticket: Ticket[None] = Ticket(f"read of {name}", self._engine.describe)
        self._engine.submit(Group(ticket, priority), transfers)
        return ticket

    def close(self) -> None:
        """Close the files. Idempotent. A read that another thread has begun raises `StateError`."""
        self._finish()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SavedTensorSource:
    """A tensor of a checkpoint, as a source of its bytes."""

    def __init__(self, reader: CheckpointReader, saved: SavedTensor) -> None:
        self._reader, self._saved = reader, saved
        self.name, self.dtype, self.shape = saved.name, DTYPES[saved.dtype], saved.shape
        self.nbytes, self.parts = saved.nbytes, saved.parts

    def read_into(self, begin_bytes: int, target: Any) -> None:
        """Fill `target`, a contiguous host tensor or a buffer, with bytes from `begin_bytes` on.

        Compares each part of the tensor that lies in it whole with its checksum. After an error the
        contents of `target` must not be used.
        """
        buffer = Buffer.of(self.name, target, writable=True)
        if not isinstance(begin_bytes, int) or not 0 <= begin_bytes <= self.nbytes - buffer.nbytes:
            raise ConfigError(
                f"{self.name}: expected bytes within its {self.nbytes}, got {buffer.nbytes} from "
                f"{begin_bytes!r} on"
            )
        if not buffer.nbytes:
            return
        reader, first = self._reader, self.parts[0]
        file, offset = reader._files[first.file], first.offset + begin_bytes
        file.check_unchanged(self.name)
        reader._start(Priority.WAITED_FOR, self.name, file, offset, buffer).wait()
        file.check_unchanged(self.name)
        view = buffer.view()
        for part in self.parts:
            begin = part.offset - offset
            if begin >= 0 and begin + part.nbytes <= buffer.nbytes:  # it was read whole
                crc = crc32(view[begin : begin + part.nbytes])
                if crc != part.crc32:
                    raise _mismatch(file, self._saved, part, crc)
        reader._metrics.count("checkpoint_read_bytes", buffer.nbytes)


def _mismatch(
    file: DirectFile, tensor: SavedTensor, part: CheckedPart, crc: int
) -> CorruptionError:
    return CorruptionError(
        f"{tensor.name}: {part.nbytes} bytes at {part.offset} of {file.path} have the CRC-32 "
        f"{crc:08x}, expected {part.crc32:08x}: they are not what was saved; take another "
        "checkpoint, and see dmesg and smartctl about the drive",
        errno=errno.EBADMSG,
        operation="read",
        file=str(file.path),
        offset_bytes=part.offset,
        tensor=tensor.name,
    )


def _close(
    pid: int, engine: IOEngine | None, fds: list[int], directory: CheckpointDirectory
) -> None:
    if os.getpid() != pid:  # a forked child shares the parent's lock, and must not release it
        return
    if engine is not None:
        engine.close()
    if engine is None or (engine.is_over and engine.abandoned_bytes == 0):
        close_fds(fds)
    directory.close()
