"""Hidden directories, which no load looks at: checkpoints that are being written or removed.

Their names begin with a dot and hold the name that they will have or had. A process that works on
one holds a lock on it, which the system releases when the process ends, in any way. So a directory
whose lock is free has no owner any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterable
from typing import Final

from offload.checkpoint.disk import CheckpointDisk
from offload.checkpoint.format.manifest import MANIFEST, SHARD_NAME

PART: Final = "part"  # is being written
OLD: Final = "old"  # is being removed
MOST_NAME_BYTES: Final = 200  # so that the hidden name is not too long for a file system
_HIDDEN: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(?:part|old)", re.DOTALL)
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def hidden_name(name: str, kind: str) -> str:
    """Return a new hidden name for `name`."""
    return f".{name}.{secrets.token_hex(8)}.{kind}"


def name_within(hidden: str) -> str | None:
    """Return the name that a hidden name stands for; None: it is not one that a save makes."""
    found = _HIDDEN.fullmatch(hidden)
    return found[1] if found else None


def open_directory(dir_fd: int, name: str) -> int:
    return os.open(name, _OPEN, dir_fd=dir_fd)


def try_lock(fd: int, shared: bool = False) -> bool | None:
    """Take the lock of a directory; return whether it was free. None: there are no locks here."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def leads_to(dir_fd: int, name: str, fd: int) -> bool:
    """Return whether `name` in a directory is the file or directory open as `fd`."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def identity_of(fd: int) -> list[int]:
    """Return device and inode, by which another process knows that it has the same file open."""
    found = os.fstat(fd)
    return [found.st_dev, found.st_ino]


def is_ours(name: str) -> bool:
    """Return whether a save makes files of that name."""
    return name == MANIFEST or SHARD_NAME.fullmatch(name) is not None


def remove(
    disk: CheckpointDisk, dir_fd: int, name: str, fd: int, files: Iterable[str] | None = None
) -> None:
    """Remove the directory `name`, open as `fd`, with `files` in it; None: all that a save makes.

    The manifest is removed first: from then on the rest, under any name, is no checkpoint. Raises
    `OSError` if something is left.
    """
    if files is None:
        files = [file for file in os.listdir(fd) if is_ours(file)]
    for file in sorted(files, key=lambda file: (file != MANIFEST, file)):
        disk.unlink(fd, file)
    disk.rmdir(dir_fd, name)
