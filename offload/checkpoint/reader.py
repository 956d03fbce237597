"""A checkpoint open for reading: nothing in it is trusted, and no byte passes unchecked.

The manifest says which bytes belong to which tensor, and has a checksum for each part of them.
`check` compares all of it in one pass over the files; reads of single tensors compare again what
they read whole. Bytes are read from the drive, not from the page cache, where the file system
allows.

An open reader holds a shared lock on the directory, so that no save removes it as too old.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offload.checkpoint.disk import BLOCK_BYTES
from offload.checkpoint.division import share_of
from offload.checkpoint.format.crc import crc32
from offload.checkpoint.format.directory import CheckpointDirectory, read_into
from offload.checkpoint.format.manifest import CheckedPart, Manifest, SavedTensor
from offload.checkpoint.io_buffers import IoBuffer, IoBuffers
from offload.checkpoint.staging_dir import try_lock
from offload.core.drive_facts import read_dio_alignment
from offload.core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    OffloadError,
    StoreError,
    StoreTimeout,
)
from offload.core.metrics import Metrics
from offload.core.portable import drop_cached
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.choose import open_engine
from offload.storage.engine import Group, IOEngine, Priority, Transfer, make_sums
from offload.storage.safetensors_header import TensorSpec, build_header

_BUFFER_BYTES = 4 << 20
_BUFFERS = 8
_DIRECT_BYTES = 256 << 10  # the smallest read that is worth direct I/O


@dataclass(frozen=True)
class _Way:
    """A way to read a file: with direct I/O, or through the page cache (align 1)."""

    fd: int
    align: int
    label: str


class _ShardFile:
    """A shard, open for reading."""

    def __init__(
        self, directory: CheckpointDirectory, name: str, nbytes: int, fds: list[int]
    ) -> None:
        self.path = directory.path / name
        self.name, self.nbytes = name, nbytes
        fds.append(_open(directory, name))
        self.buffered = _Way(fds[-1], 1, str(self.path))
        self._seen = os.fstat(fds[-1])
        if self._seen.st_size != nbytes:
            raise FormatError(f"{self.path}: has {self._seen.st_size} bytes, expected {nbytes}")
        self.direct = self._open_direct(directory, fds)

    def _open_direct(self, directory: CheckpointDirectory, fds: list[int]) -> _Way | None:
        """Open the same file for direct I/O; None if a direct read does not work there."""
        if not hasattr(os, "O_DIRECT") or self.nbytes < 2 * BLOCK_BYTES:
            return None
        fd = _open(directory, self.name)
        fds.append(fd)
        if not os.path.samestat(os.fstat(fd), self._seen):
            raise FormatError(f"{self.path}: was replaced while it was opened")
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            align = max(BLOCK_BYTES, *(read_dio_alignment(fd) or (BLOCK_BYTES, BLOCK_BYTES)))
            buffer = IoBuffers(align, 1).take()
            assert buffer is not None
            works = align <= _BUFFER_BYTES and os.preadv(fd, [buffer.view], 0) > 0
        except OSError:
            works = False
        return _Way(fd, align, str(self.path)) if works else None

    def check_unchanged(self, tensor: str) -> None:
        now = os.fstat(self.buffered.fd)
        if (now.st_size, now.st_mtime_ns) != (self._seen.st_size, self._seen.st_mtime_ns):
            raise StoreError(
                f"{tensor}: {self.path} was changed while it was open; load again",
                operation="read",
                file=str(self.path),
                tensor=tensor,
            )

    def drop_cache(self) -> None:
        """Drop the file from the page cache, so that the next read through it is from the drive."""
        with suppress(OSError):
            drop_cached(self.buffered.fd, 0, 0)

    def cut(self, offset: int, nbytes: int) -> Iterator[tuple[_Way, int, int]]:
        """Split a range into ways, offsets and lengths: whole blocks of a large range are read with
        direct I/O, everything else through the page cache.
        """
        end = offset + nbytes
        first = last = end
        if self.direct is not None and nbytes >= _DIRECT_BYTES:
            align = self.direct.align
            first = -(-offset // align) * align
            last = max(first, end // align * align)
        for begin, stop in ((offset, first), (first, last), (last, end)):
            if stop > begin:
                is_direct = begin == first and stop == last and first < last
                way = self.direct if is_direct and self.direct is not None else self.buffered
                yield way, begin, stop - begin


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
            try_lock(self._directory.fd, shared=True)
            self.manifest: Manifest = self._directory.read_manifest()
            self._files = {
                name: _ShardFile(self._directory, name, nbytes, self._fds)
                for name, nbytes in self.manifest.files.items()
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
        before_part: Callable[[], None] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Compare every byte with its checksum, and every header with the manifest.

        Raises `CorruptionError` or `FormatError` for the first thing that is wrong. buffers: memory
        to read through, 32 MiB of its own otherwise. before_part: called before each part; may end
        the check with an error. share: a rank and the number of ranks; what this rank leaves out is
        for the other ranks to check.
        """
        buffers = buffers or IoBuffers(_BUFFER_BYTES, _BUFFERS)
        tensors: dict[str, list[SavedTensor]] = {name: [] for name in self._files}
        for tensor in self.manifest.tensors.values():
            tensors[tensor.parts[0].file].append(tensor)
        for each in tensors.values():
            each.sort(key=lambda tensor: (tensor.parts[0].offset, tensor.nbytes))
        sizes = [p.nbytes for each in tensors.values() for tensor in each for p in tensor.parts]
        mine, before = share_of(sizes, *share), 0
        for name, file in self._files.items():
            parts = [(tensor, part) for tensor in tensors[name] for part in tensor.parts]
            own = parts[max(0, mine.start - before) : max(0, mine.stop - before)]
            before += len(parts)
            file.drop_cache()
            if own or share[0] == 0:
                self._check_header(file, tensors[name])
                self._check_data(file, own, buffers, before_part or (lambda: None))

    def _check_header(self, file: _ShardFile, tensors: list[SavedTensor]) -> None:
        """Check that the header is, byte for byte, the one that these tensors require."""
        expected, _ = build_header([TensorSpec(t.key, t.dtype, t.shape) for t in tensors])
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
        file: _ShardFile,
        parts: list[tuple[SavedTensor, CheckedPart]],
        buffers: IoBuffers,
        before_part: Callable[[], None],
    ) -> None:
        begin = parts[0][1].offset if parts else file.nbytes
        nbytes = sum(part.nbytes for _, part in parts)
        stream = _Stream(file, begin, begin + nbytes, self._engine, buffers)
        try:
            for tensor, part in parts:
                before_part()
                crc = 0
                for view in stream.read(part.nbytes):
                    crc = crc32(view, crc)
                if crc != part.crc32:
                    raise _mismatch(file, tensor, part, crc)
        finally:
            stream.close()
        file.check_unchanged(file.name)
        self._metrics.count("checkpoint_checked_bytes", nbytes)

    # --- parts ------------------------------------------------------------------------------------

    def _read(self, tensor: SavedTensor, begin: int, target: Buffer) -> None:
        if not target.nbytes:
            return
        first = tensor.parts[0]
        file = self._files[first.file]
        file.check_unchanged(tensor.name)
        group = Group(Ticket(f"read of {tensor.name}", self._engine.describe), Priority.WAITED_FOR)
        offset = first.offset + begin
        transfers = [
            Transfer(tensor.name, False, way, at, target.part(at - offset, nbytes), make_sums(0, 1))
            for way, at, nbytes in file.cut(offset, target.nbytes)
        ]
        self._engine.submit(group, transfers)
        group.ticket.wait()
        file.check_unchanged(tensor.name)
        self._compare(file, tensor, offset, target)
        self._metrics.count("checkpoint_read_bytes", target.nbytes)

    def _compare(self, file: _ShardFile, tensor: SavedTensor, offset: int, target: Buffer) -> None:
        """Compare every part that was read whole with its checksum."""
        bytes_read = (ctypes.c_char * target.nbytes).from_address(target.address)
        view = memoryview(bytes_read).cast("B")
        for part in tensor.parts:
            begin = part.offset - offset
            if begin >= 0 and begin + part.nbytes <= target.nbytes:
                crc = crc32(view[begin : begin + part.nbytes])
                if crc != part.crc32:
                    raise _mismatch(file, tensor, part, crc)

    def close(self) -> None:
        """Close the files. Idempotent. A read that another thread has begun raises `StateError`."""
        self._finish()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SavedTensorSource:
    """A tensor of a checkpoint, as a source of its bytes. dtype: as safetensors calls it."""

    def __init__(self, reader: CheckpointReader, saved: SavedTensor) -> None:
        self._reader, self._saved = reader, saved
        self.name, self.dtype, self.shape = saved.name, saved.dtype, saved.shape
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
        self._reader._read(self._saved, begin_bytes, buffer)


class _Stream:
    """A sequential read of a file from `offset` to `end`, some reads ahead."""

    def __init__(
        self, file: _ShardFile, offset: int, end: int, engine: IOEngine, buffers: IoBuffers
    ) -> None:
        self._file, self._engine, self._buffers = file, engine, buffers
        self._next, self._end = offset, end  # not requested yet
        self._ahead: deque[tuple[Ticket[None], IoBuffer, int]] = deque()
        self._view: memoryview = memoryview(b"")
        self._buffer: IoBuffer | None = None

    def read(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next bytes, in pieces; each is valid until the next one is requested."""
        while nbytes:
            if not self._view:
                self._advance()
            part = self._view[:nbytes]
            self._view = self._view[len(part) :]
            nbytes -= len(part)
            yield part

    def _advance(self) -> None:
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None
        while self._next < self._end:
            buffer = self._buffers.take()
            if buffer is None:
                break
            self._start(buffer)
        ticket, buffer, nbytes = self._ahead.popleft()
        ticket.wait()
        self._buffer, self._view = buffer, buffer.view[:nbytes]

    def _start(self, buffer: IoBuffer) -> None:
        """Start a read up to the next multiple of the buffer, so later ones begin at blocks."""
        size = self._buffers.each_bytes
        nbytes = min(size - self._next % size, self._end - self._next)
        memory = buffer.buffer(nbytes)
        ticket: Ticket[None] = Ticket(f"read of {self._file.path}", self._engine.describe)
        transfers = []
        for way, at, length in self._file.cut(self._next, nbytes):
            part = memory.part(at - self._next, length)
            transfers.append(Transfer(self._file.name, False, way, at, part, make_sums(0, 1)))
        self._engine.submit(Group(ticket, Priority.PREFETCH), transfers)
        self._ahead.append((ticket, buffer, nbytes))
        self._next += nbytes

    def close(self) -> None:
        """Wait for the reads in flight, whether or not they succeed, and return the buffers to the
        pool, but for those of reads that have timed out.
        """
        while self._ahead:
            ticket, buffer, _ = self._ahead.popleft()
            try:
                ticket.wait()
            except OffloadError as error:
                if isinstance(error, StoreTimeout):  # the kernel may still write to it
                    continue
            self._buffers.give_back(buffer)
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)


def _open(directory: CheckpointDirectory, name: str) -> int:
    """Open a regular file for blocking reads: otherwise io_uring requests every piece again and
    again until the drive happens to have it at once.
    """
    fd = directory.open(name)
    os.set_blocking(fd, True)
    return fd


def _mismatch(
    file: _ShardFile, tensor: SavedTensor, part: CheckedPart, crc: int
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
        while fds:
            os.close(fds.pop())
    with suppress(OSError):  # closing is not enough if a forked child shares it
        fcntl.flock(directory.fd, fcntl.LOCK_UN)
    directory.close()
