"""File calls: those that only Linux has, with the nearest replacement elsewhere, and small files
that only their owner can read, written atomically and read up to a size limit.

Linux is the supported system; on macOS the engine should run, slowly, so that users can try code.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from offload.core.errors import ConfigError, FormatError, StoreError
from offload.core.strict_json import parse_json, printable

T = TypeVar("T")
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


def write_private(path: Path, content: str | bytes) -> None:
    """Replace `path` atomically with a file that only its owner can read.

    Raises `ConfigError` if `path` exists and is no ordinary file, or its directory does not exist;
    `StoreError` if the system refuses.
    """
    try:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise ConfigError(f"path: expected a new or an ordinary file, {path} is something else")
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        except FileNotFoundError as error:
            problem = "takes no files" if path.parent.is_dir() else "is not there; make it"
            raise ConfigError(f"path: the directory {path.parent} {problem}") from error
        try:
            with open(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise refused(path, "write", error, remedy="see that you may write there") from error


def read_small(path: Path, most_bytes: int) -> bytes:
    """Read an ordinary file of at most `most_bytes`. Raises `FormatError` if it is no ordinary file
    or is longer, and `StoreError` if it cannot be read.
    """
    try:
        # Without O_NONBLOCK the open of a pipe would block until another process writes.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FormatError(f"{path}: expected an ordinary file")
            with open(handle, "rb", closefd=False) as file:
                text = file.read(most_bytes + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise refused(path, "read", error) from error
    if len(text) > most_bytes:
        raise FormatError(f"{path}: has more than {most_bytes} bytes; expected a small file")
    return text


def read_json(
    path: Path, most_bytes: int, make: Callable[[Any], T] = lambda found: found, remedy: str = ""
) -> T:
    """Return what `make` makes of the JSON in a file that `read_small` reads. Raises `FormatError`,
    with the path before its text and `remedy` behind it, if it is no such JSON.
    """
    text = read_small(path, most_bytes)
    try:
        return make(parse_json(text))
    except FormatError as error:
        raise FormatError(f"{printable(path)}: {error}{remedy}") from error
