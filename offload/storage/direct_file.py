"""A file that is only read: large ranges with direct I/O where that works, as far as they are whole
blocks of the drive, and everything else through the page cache.

Size and modification time are recorded when a file is opened; `check_unchanged` compares them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offload.core.drive_facts import read_dio_alignment
from offload.core.errors import StoreError
from offload.storage.files import BLOCK_BYTES

DIRECT_BYTES: Final = 256 << 10  # from which on a range is worth more than one read
_MOST_ALIGN: Final = 4 << 20


@dataclass(frozen=True)
class OpenedFile:
    """A descriptor of a file, for direct I/O (align: of offsets and lengths) or buffered (1)."""

    fd: int
    align: int
    label: str


class DirectFile:
    """A regular file that is open for reading as long as its descriptors are.

    fds: the descriptors, whose owner closes them when no read is in flight; its last is the file's
    own, and one for direct I/O is added. remedy: what to do about a file that has changed.
    """

    def __init__(self, path: Path, fds: list[int], remedy: str) -> None:
        self.path, self.label, self._remedy = path, str(path), remedy
        fd = fds[-1]
        # Else io_uring requests every piece again and again until the drive has it at once.
        os.set_blocking(fd, True)
        self.buffered = OpenedFile(fd, 1, self.label)
        self._seen = os.fstat(fd)
        self.nbytes = self._seen.st_size
        self.direct = self._open_direct(fds)

    def _open_direct(self, fds: list[int]) -> OpenedFile | None:
        """Open the same file for direct I/O; return None unless a test read succeeds."""
        if not hasattr(os, "O_DIRECT") or self.nbytes < BLOCK_BYTES:
            return None
        try:
            same = f"/proc/self/fd/{self.buffered.fd}"
            fds.append(os.open(same, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:
            return None
        fd = fds[-1]
        declared = read_dio_alignment(fd) or (BLOCK_BYTES, BLOCK_BYTES)
        align = max(BLOCK_BYTES, *declared)
        if 0 in declared or align > _MOST_ALIGN or not os.path.samestat(os.fstat(fd), self._seen):
            return None
        with mmap.mmap(-1, align) as area:
            try:
                works = os.preadv(fd, [area], 0) == min(align, self.nbytes)
            except OSError:
                works = False
        return OpenedFile(fd, align, self.label) if works else None

    @property
    def is_slow(self) -> bool:
        """Whether ranges for direct I/O pass through the page cache all the same."""
        return self.direct is None and self.nbytes >= DIRECT_BYTES

    def cut(self, offset: int, nbytes: int) -> Iterator[tuple[OpenedFile, int, int]]:
        """Split a range into descriptors, offsets and lengths: whole blocks of the drive, for
        direct I/O, and two ends.
        """
        end = offset + nbytes
        first = last = end
        direct = self.direct
        if direct is not None and nbytes >= DIRECT_BYTES:
            first = -(-offset // direct.align) * direct.align
            last = max(first, end // direct.align * direct.align)
        bounds = ((self.buffered, offset, first), (direct, first, last), (self.buffered, last, end))
        for file, begin, stop in bounds:
            if stop > begin:
                assert file is not None
                yield file, begin, stop - begin

    def check_unchanged(self, tensor: str | None = None) -> None:
        """Raise `StoreError` if the file's size or modification time differs from that at opening.

        tensor: the name that the message gives.
        """
        now, then = os.fstat(self.buffered.fd), self._seen
        if (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns):
            return
        what = f"{tensor}: " if tensor else ""
        raise StoreError(
            f"{what}{self.path} has changed while it was in use: it had {then.st_size} bytes, "
            f"written {then.st_mtime_ns} ns after 1970, and has {now.st_size}, written "
            f"{now.st_mtime_ns}; {self._remedy}",
            operation="read",
            file=self.label,
            tensor=tensor,
        )
