"""File calls, among them those that only Linux has, with the nearest replacement elsewhere.

Linux is the supported system; on macOS the engine should run, slowly, so that users can try code.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from offload.core.errors import StoreError
from offload.core.strict_json import printable

RESERVES: Final = hasattr(os, "posix_fallocate")  # else the drive may run out of space later


def reserve(fd: int, nbytes: int, begin: int = 0) -> None:
    """Extend a file to hold `nbytes` from `begin` on; allocate their space if the system can."""
    if RESERVES:
        os.posix_fallocate(fd, begin, nbytes)
    else:
        os.ftruncate(fd, max(begin + nbytes, os.fstat(fd).st_size))


def sync_data(fd: int) -> None:
    """Make all data written to the file durable."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Advise the kernel to drop a part of a file from the page cache; 0 bytes: up to the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def refused(
    path: object,
    operation: str,
    error: OSError | ValueError,
    *,
    offset: int | None = None,
    remedy: str = "see that it is there and may be read",
) -> StoreError:
    """Return the error to raise where the system refuses an operation on a file."""
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number else str(error)
    return StoreError(
        f"{printable(path)}: cannot {operation} it: {why}; {remedy}",
        errno=number,
        operation=operation,
        file=str(path),
        offset_bytes=offset,
    )


def close_fds(fds: list[int]) -> None:
    """Close all descriptors and empty the list. Idempotent."""
    while fds:
        with suppress(OSError):
            os.close(fds.pop())
