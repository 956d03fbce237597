"""Calls on files that Linux has and others lack, with what comes nearest there.

Linux is what we support; on macOS everything is meant to run, slowly, so that code can be tried.
"""

from __future__ import annotations

import os
from typing import Final

RESERVES: Final = hasattr(os, "posix_fallocate")  # else a drive may still turn out to be too small


def reserve(fd: int, nbytes: int, begin: int = 0) -> None:
    """Give a file `nbytes` from `begin` on, and where the system can, room for all of them."""
    if RESERVES:
        os.posix_fallocate(fd, begin, nbytes)
    else:
        os.ftruncate(fd, max(begin + nbytes, os.fstat(fd).st_size))


def sync_data(fd: int) -> None:
    """Make what was written durable."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Let the page cache forget a part of a file; 0 bytes: all from there on. It is only asked."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
