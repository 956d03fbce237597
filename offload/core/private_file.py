"""Small files that only their owner can read: written atomically, and read up to a size limit."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from offload.core.errors import ConfigError, FormatError
from offload.core.portable import refused


def write_private(path: Path, content: str | bytes) -> None:
    """Replace `path` atomically with a file that only its owner can read.

    Raises `ConfigError` if `path` exists and is no ordinary file, or its directory does not exist;
    `StoreError` if the system refuses.
    """
    try:
        _write(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise refused(path, "write", error, remedy="see that you may write there") from error


def _write(path: Path, content: bytes) -> None:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        there = None
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise ConfigError(f"path: expected a new or an ordinary file, {path} is something else")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    except FileNotFoundError as error:
        raise ConfigError(f"path: the directory {path.parent} is not there; make it") from error
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


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
