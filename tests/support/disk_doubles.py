"""Stand-ins for `CheckpointDisk`: a plain one, and one that counts its calls and fails at one.
Their engine does everything at once, in the caller's thread, through the disk, so that the order of
all operations is known. The one that records is in `power_loss.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offload.checkpoint.disk import CheckpointDisk
from offload.core.metrics import Metrics
from offload.storage.buffers import Buffer
from offload.storage.engine import Fault, IOEngine, Priority, Transfer

SECTOR = 512


class StraightEngine(IOEngine):
    """An I/O engine that reads and writes at once, in the caller's thread."""

    def __init__(self, disk: StraightDisk) -> None:
        super().__init__("straight", 1 << 20, 30.0)
        self._disk = disk

    def _start(self, number: int, transfer: Transfer, priority: Priority) -> None:
        memory = transfer.memory
        view = memory.view()
        move = self._disk.write_data if transfer.is_write else self._disk.read_data
        try:
            code = (
                0 if move(transfer.file.fd, view, transfer.offset) == memory.nbytes else errno.EIO
            )
        except OSError as error:
            code = error.errno or errno.EIO
        self._end(number, code)

    def _withdraw(self, number: int) -> None:
        self._end(number, errno.ECANCELED)

    def _promote(self, number: int) -> None: ...

    def _ages(self) -> dict[int, float]:
        return {}

    def sum_of(self, memory: Buffer) -> int:
        return 0

    def inject(self, fault: Fault) -> None: ...

    def attempts(self) -> int:
        return 0

    def _stop(self) -> None: ...


class StraightDisk(CheckpointDisk):
    """A disk that claims to write files by direct I/O, in whole blocks, without doing so."""

    def go_direct(self, fd: int) -> int:
        return 4096

    def open_engine(self, metrics: Metrics) -> IOEngine:
        return StraightEngine(self)

    def write_data(self, fd: int, data: Any, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def read_data(self, fd: int, data: Any, offset: int) -> int:
        return os.preadv(fd, [data], offset)


# --- faults ---------------------------------------------------------------------------------------

GROWING = {"mkdir", "open_new", "allocate", "write", "write_data", "fsync", "fsync_dir", "rename"}


@dataclass
class FaultyDisk(StraightDisk):
    """A disk whose `nth` call (from 1) fails with `code`.

    forever: operations that fail from then on, too.
    A sync that failed must not be tried again on the same file.
    """

    nth: int = 0
    code: int = errno.EIO
    forever: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)  # operation, file
    points: list[tuple[int, str]] = field(default_factory=list)  # calls before it, point
    unsynced: set[tuple[int, int]] = field(default_factory=set)
    failed: tuple[str, str] | None = None

    def hook(self, point: str) -> None:
        self.points.append((len(self.calls), point))

    def point_of(self, name: str) -> int:
        """Return how many calls come before a point."""
        return next(count for count, point in self.points if point == name)

    def _count(self, operation: str, file: str) -> None:
        self.calls.append((operation, file))
        late = self.failed is not None and operation in self.forever
        if len(self.calls) == self.nth or late:
            self.failed = self.failed or (operation, file)
            raise OSError(self.code, os.strerror(self.code))

    def _sync(self, operation: str, fd: int, call: Callable[[int], None]) -> None:
        found = os.fstat(fd)
        identity = found.st_dev, found.st_ino
        assert identity not in self.unsynced, f"{operation} of {_name(fd)} after it has failed"
        try:
            self._count(operation, _name(fd))
        except OSError:
            self.unsynced.add(identity)
            raise
        call(fd)

    def mkdir(self, dir_fd: int, name: str) -> None:
        self._count("mkdir", name)
        super().mkdir(dir_fd, name)

    def open_new(self, dir_fd: int, name: str) -> int:
        self._count("open_new", name)
        return super().open_new(dir_fd, name)

    def chmod(self, fd: int, mode: int) -> None:
        self._count("chmod", _name(fd))
        super().chmod(fd, mode)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._count("allocate", _name(fd))
        super().allocate(fd, nbytes)

    def go_direct(self, fd: int) -> int:
        self._count("go_direct", _name(fd))
        return super().go_direct(fd)

    def write(self, fd: int, data: Any, offset: int) -> int:
        self._count("write", _name(fd))
        return super().write(fd, data, offset)

    def write_data(self, fd: int, data: Any, offset: int) -> int:
        self._count("write_data", _name(fd))
        return super().write_data(fd, data, offset)

    def read_data(self, fd: int, data: Any, offset: int) -> int:
        self._count("read_data", _name(fd))
        return super().read_data(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._count("truncate", _name(fd))
        super().truncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd, super().fsync)

    def fsync_dir(self, fd: int) -> None:
        self._sync("fsync_dir", fd, super().fsync_dir)

    def rename(self, dir_fd: int, old: str, new: str) -> None:
        self._count("rename", new)
        super().rename(dir_fd, old, new)

    def unlink(self, dir_fd: int, name: str) -> None:
        self._count("unlink", name)
        super().unlink(dir_fd, name)

    def rmdir(self, dir_fd: int, name: str) -> None:
        self._count("rmdir", name)
        super().rmdir(dir_fd, name)


def _name(fd: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
