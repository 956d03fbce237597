"""The output of a save: buffers, writes in flight to its files, and the first error.

Bytes are copied into buffers of this object's own, from which an I/O engine writes them. All shards
of a checkpoint share it, so its memory is bounded for all together. The first error is kept: the
next write raises it, and so does `flush`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.checkpoint.disk import BLOCK_BYTES, CheckpointDisk, told, write_whole
from offload.core.errors import ConfigError, OffloadError, StateError, StoreTimeout
from offload.core.locks import Gate
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.direct_file import OpenedFile
from offload.storage.engine import Group, Priority, Transfer, make_sums

BUFFER_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20
_BUFFERS = 16  # equal parts of the memory; one of them is for partial blocks, which shards keep


@dataclass(frozen=True)
class OutputFile(OpenedFile):
    """An open file to be written. block_bytes: the least that is written at once. cached_fd: the
    same file through the page cache, where several ranks write it.
    """

    cached_fd: int = -1

    @property
    def block_bytes(self) -> int:
        return max(BLOCK_BYTES, self.align)


class IoBuffers:
    """A pool of page-aligned buffers of `each_bytes`, for bytes in flight. Forked children do not
    inherit the memory: the kernel would copy pages under running writes. Not thread-safe.

    free: those that are not in use. They are taken from its end and given back there, so a small
    save touches few of them.
    """

    def __init__(self, each_bytes: int, count: int) -> None:
        self.each_bytes = each_bytes
        area = mmap.mmap(-1, each_bytes * count)
        with contextlib.suppress(OSError, AttributeError):
            area.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError, AttributeError):  # fewer segments for the drive
            area.madvise(mmap.MADV_HUGEPAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self.free = [
            Buffer(begin + at, each_bytes, area) for at in reversed(range(0, len(area), each_bytes))
        ]


class _Write(Group):
    __slots__ = ("buffer", "nbytes", "output")

    def __init__(self, output: Output, what: str, buffer: Buffer, nbytes: int) -> None:
        super().__init__(Ticket(what, output.engine.describe), Priority.WRITE_BACK)
        self.output, self.buffer, self.nbytes = output, buffer, nbytes

    def end(self, error: OffloadError | None) -> None:
        self.error = None  # raised by the next write and by flush; no code waits for the ticket
        self.output._ended(self, error)


class Output:
    """The output of one save, until `close`. Any thread may use it."""

    def __init__(self, disk: CheckpointDisk, metrics: Metrics, buffer_bytes: int) -> None:
        each_bytes = min(_BUFFER_BYTES, buffer_bytes // _BUFFERS // BLOCK_BYTES * BLOCK_BYTES)
        if each_bytes < BLOCK_BYTES:
            raise ConfigError(
                f"buffer_bytes: expected {_BUFFERS * BLOCK_BYTES} or more, got {buffer_bytes}"
            )
        self.each_bytes = each_bytes
        self._disk = disk
        self.written_bytes = 0
        self.buffers = IoBuffers(each_bytes, buffer_bytes // each_bytes - 1)
        self._lock = threading.RLock()  # a finalizer may take it again in the same thread
        self._changed = Gate(self._lock)
        self._under_way = 0
        self.progress = 0  # writes that have ended, and buffers that were returned unused
        self.looks = 0  # calls of `check`: the progress of a thread that reads or syncs
        self._error: BaseException | None = None
        self.engine = disk.open_engine(metrics)
        weakref.finalize(self, self.engine.close)  # else the engine's thread keeps it for ever

    # --- memory -----------------------------------------------------------------------------------

    def take_buffer(self) -> Buffer:
        """Take a buffer of `each_bytes`; block until one is free. Raises the first error."""
        with self._lock:
            self._wait_while(lambda: not self.buffers.free)
            self.check()
            return self.buffers.free.pop()

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool that was taken and not written."""
        with self._lock:
            self.buffers.free.append(buffer)
            self.progress += 1
            self._changed.notify_all()

    # --- writes -----------------------------------------------------------------------------------

    def start(self, name: str, file: OutputFile, offset: int, buffer: Buffer, nbytes: int) -> None:
        """Start to write from a buffer, which returns to the pool at the end. name: for errors."""
        group = _Write(self, f"write of {name}", buffer, nbytes)
        sums = make_sums(nbytes, self.engine.sum_bytes)
        transfer = Transfer(name, True, file, offset, buffer.part(0, nbytes), sums)
        with self._lock:
            self._under_way += 1
        try:
            self.engine.submit(group, [transfer])
        except BaseException as error:
            if not group.begun:
                self._ended(group, StateError(f"{name}: its write could not be started"))
            self.fail(error)
            raise

    def put_ranges(
        self, file: OutputFile, offset: int, data: bytearray, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Write only these byte ranges of the file, from data that lies at `offset`, through the
        page cache, which has them when this returns.
        """
        view = memoryview(data)
        try:
            self.check()
            for begin, end in ranges:
                with told("write", file.label):
                    part = view[begin - offset : end - offset]
                    write_whole(self._disk, file.cached_fd, part, begin)
        except BaseException as error:
            self.fail(error)
            raise
        with self._lock:
            self.written_bytes += sum(end - begin for begin, end in ranges)

    def _ended(self, write: _Write, error: OffloadError | None) -> None:
        """Account for a write that has ended. In a thread of the engine, as a rule."""
        timed_out = isinstance(error, StoreTimeout) and error.errno == errno.ETIMEDOUT
        with self._lock:
            self._under_way -= 1
            self.progress += 1
            if error is None:
                self.written_bytes += write.nbytes
            elif self._error is None:
                self._error = error
            if not timed_out:  # else the kernel may still read it
                self.buffers.free.append(write.buffer)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop all further writes with `error`. The first error counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        self.looks += 1
        error = self._error
        if error is not None:
            raise error

    def flush(self) -> None:
        """Block until no write is in flight, or until the first error, and raise that."""
        with self._lock:
            self._wait_while(lambda: self._under_way > 0)
        self.check()

    def _wait_while(self, is_so: Callable[[], bool]) -> None:
        """Block while `is_so`, but at most until the first error. Call it under the lock. Every
        write has a deadline, and so has this.
        """
        self._changed.wait_until(
            lambda: self._error is not None or not is_so(),
            "writes of a checkpoint",
            progress=lambda: self.progress,
        )

    def close(self, why: BaseException) -> bool:
        """End the writes in flight; from now on `why` is raised, or an earlier error. Returns
        whether all of them have ended: otherwise the kernel may still use the files.
        """
        self.fail(why)
        self.engine.close()
        return self.engine.is_over and self.engine.abandoned_bytes == 0
