"""Every call of a save that changes the disk, on one object.

So a test can put another object in its place: one that records, one that fails, one that ends the
process at a named point. Directories are given by their open descriptors, files by a directory and
a name. Calls raise `OSError`; `told` turns it into a `StoreError` that names the file.

Checkpoints that are being written or removed are in hidden directories, which no load looks at.
Their names begin with a dot and hold the name that they will have or had. A process that works on
one holds a lock on it, which the system releases when the process ends, in any way. So a directory
whose lock is free has no owner any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from offload.checkpoint.format.directory import CheckpointDirectory
from offload.checkpoint.format.manifest import MANIFEST, SHARD_NAME
from offload.core.drive_facts import probe_direct_io
from offload.core.errors import StoreError
from offload.core.metrics import Metrics
from offload.core.portable import reserve
from offload.storage.choose import open_engine
from offload.storage.engine import IOEngine

BLOCK_BYTES = 4096
PART: Final = "part"  # the end of a hidden name: is being written
OLD: Final = "old"  # is being removed
MOST_NAME_BYTES: Final = 200  # so that the hidden name is not too long for a file system
_HIDDEN: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(?:part|old)", re.DOTALL)
# The points of a save at which `CheckpointDisk.hook` is called, in their order. The last two occur
# once for each older checkpoint that is removed.
POINTS = (
    "created",
    "shard opened",
    "data written",
    "files synced",
    "manifest written",
    "manifest synced",
    "verified",
    "renamed",
    "parent synced",
    "old one hidden",
    "old one removed",
)
_RENAME_NOREPLACE = 1


class CheckpointDisk:
    """The disk of a save: the operating system's own calls. Any thread may use it."""

    def hook(self, point: str) -> None:
        """Note that a save has reached `point`, one of `POINTS`, or that a rank which is not the
        first has "joined" it. Does nothing here; a test overrides it.
        """

    def mkdir(self, dir_fd: int, name: str) -> None:
        os.mkdir(name, 0o700, dir_fd=dir_fd)

    def open_new(self, dir_fd: int, name: str) -> int:
        """Create a file and open it for reading and writing. The caller closes it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=dir_fd)

    def open_again(self, dir_fd: int, name: str) -> int:
        """Open a file that exists for reading and writing. The caller closes it."""
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)

    def chmod(self, fd: int, mode: int) -> None:
        """Set the mode, which the umask or the parent directory's ACL may have changed."""
        os.fchmod(fd, mode)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Make an empty file `nbytes` long, and reserve space for all of them."""
        found = os.fstatvfs(fd)
        if nbytes > found.f_frsize * found.f_bavail:  # else the call fills the drive first
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, nbytes)

    def go_direct(self, fd: int) -> int:
        """Switch an empty file to direct I/O if that works there. Returns the alignment that
        direct I/O requires; 1 if the file stays with the page cache.
        """
        direct = probe_direct_io(fd)
        if direct.works:
            return max(BLOCK_BYTES, direct.mem_align_bytes or 1, direct.offset_align_bytes or 1)
        if hasattr(os, "O_DIRECT"):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return 1

    def join_direct(self, fd: int) -> None:
        """Switch a file to direct I/O, which another process has found to work on it."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def open_engine(self, metrics: Metrics) -> IOEngine:
        """Open the I/O engine that moves the tensors' bytes."""
        return open_engine([], metrics=metrics)

    def write(self, fd: int, data: Any, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_dir(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, dir_fd: int, old: str, new: str) -> None:
        """Rename within a directory. Raises `OSError` if `new` exists already."""
        call = _renameat2()
        if call is not None:
            names = os.fsencode(old), os.fsencode(new)
            if call(dir_fd, names[0], dir_fd, names[1], _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):  # a kernel or file system without it
                raise OSError(code, os.strerror(code))
        # Without renameat2, the system itself refuses every target but an empty directory.
        with suppress(FileNotFoundError):
            os.stat(new, dir_fd=dir_fd, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, dir_fd: int, name: str) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, dir_fd: int, name: str) -> None:
        os.rmdir(name, dir_fd=dir_fd)


def write_whole(disk: CheckpointDisk, fd: int, data: Any, offset: int) -> None:
    """Write all of `data`, in as many calls as that takes."""
    view, at = memoryview(data), 0
    while at < len(view):
        moved = disk.write(fd, view[at:], offset + at)
        if moved <= 0:  # never seen, but the loop would not end
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        at += moved


@cache
def _renameat2() -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        path = ctypes.c_char_p
        call.argtypes = (ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint)
    return call


# --- hidden directories ---------------------------------------------------------------------------


def hidden_name(name: str, kind: str) -> str:
    """Return a new hidden name for `name`."""
    return f".{name}.{secrets.token_hex(8)}.{kind}"


def name_within(hidden: str) -> str | None:
    """Return the name that a hidden name stands for; None: it is not one that a save makes."""
    found = _HIDDEN.fullmatch(hidden)
    return found[1] if found else None


def identity_of(fd: int) -> list[int]:
    """Return device and inode, by which another process knows that it has the same file open."""
    found = os.fstat(fd)
    return [found.st_dev, found.st_ino]


def is_ours(name: str) -> bool:
    """Return whether a save makes files of that name."""
    return name == MANIFEST or SHARD_NAME.fullmatch(name) is not None


def remove(
    disk: CheckpointDisk,
    parent: CheckpointDirectory,
    name: str,
    directory: CheckpointDirectory,
    files: Iterable[str] | None = None,
) -> None:
    """Remove `directory`, which is `name` in `parent`, with `files` in it; None: all that a save
    makes.

    The manifest is removed first: from then on the rest, under any name, is no checkpoint. Raises
    `OSError` if something is left.
    """
    if files is None:
        files = [file for file in os.listdir(directory.fd) if is_ours(file)]
    for file in sorted(files, key=lambda file: (file != MANIFEST, file)):
        disk.unlink(directory.fd, file)
    disk.rmdir(parent.fd, name)


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def told(operation: str, path: Path | str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StoreError` that names the operation and the path."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise refusal(operation, path, error) from error


def refusal(operation: str, path: Path | str, error: OSError, more: str = "") -> StoreError:
    code = error.errno or 0
    return StoreError(
        f"checkpoint: {operation} of {path}: {errno.errorcode.get(code, code)} "
        f"({os.strerror(code)}){more}; {_remedy(operation, code)}",
        errno=error.errno,
        operation=operation,
        file=str(path),
    )


def _remedy(operation: str, code: int) -> str:
    if operation.startswith("fsync"):
        return (
            "bytes that the system had accepted may be lost, and asking again would hide it: this "
            "save has failed; see dmesg and save to another drive"
        )
    remedies = {
        errno.ENOSPC: "make room, or save to another drive",
        errno.EDQUOT: "your quota is used up: raise it, or save elsewhere",
        errno.EFBIG: "raise the limit of your shell (`ulimit -f`), or save on a file system that "
        "has files of that size",
        errno.EROFS: "mount it for writing",
        errno.EACCES: "let your user write there",
        errno.EPERM: "let your user write there",
        errno.EEXIST: "another process has made it meanwhile: give another path",
        errno.ENOTDIR: "give a path below a directory",
        errno.EIO: "the drive reports a failure: see dmesg and smartctl, save to another drive",
    }
    return remedies.get(code, "see dmesg for what the system says about it")
