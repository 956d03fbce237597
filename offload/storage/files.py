"""Swap files: unnamed, reserved in full at the start, read and written with direct I/O.

An unnamed file cannot collide with another file, no other program finds it in a directory, and the
kernel frees it when its process ends, however it ends. `System` holds the calls that may fail, so
that tests can make them fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.core.config import format_size
from offload.core.drive_facts import open_unnamed, probe_direct_io
from offload.core.errors import CapacityError, StoreError
from offload.core.portable import RESERVES, reserve, sync_data

# FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_NOCOW_FL of linux/fs.h.
_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000
BLOCK_BYTES = 4096  # every extent starts at a multiple of it; enough for all known drives


class System:
    """The file system calls that are made outside of an engine."""

    open_unnamed = staticmethod(open_unnamed)
    probe_direct_io = staticmethod(probe_direct_io)
    reserve = staticmethod(reserve)
    sync = staticmethod(sync_data)

    def keep_in_place(self, fd: int) -> None:
        """Turn off copy on write in this empty file, on a file system that has it (btrfs).

        Such a file system would need new room for every overwrite, despite the reservation, and
        refuse direct I/O.
        """
        with contextlib.suppress(OSError):  # other file systems reject the flag and need it not
            flags = bytearray(8)
            fcntl.ioctl(fd, _GET_FLAGS, flags)
            (found,) = struct.unpack_from("=I", flags)
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("=Q", found | _NO_COPY_ON_WRITE))

    def write(self, fd: int, data: memoryview, begin: int) -> int:
        """Write `data` at `begin`; return how many bytes of it were written."""
        return os.pwrite(fd, data, begin)

    def free_bytes(self, directory: Path) -> int:
        found = os.statvfs(directory)
        return found.f_frsize * found.f_bavail


@dataclass(frozen=True)
class SwapFile:
    """An open swap file. align: of addresses, offsets and lengths; 1 through the page cache."""

    fd: int
    directory: Path
    nbytes: int
    align: int
    notes: tuple[str, ...] = ()  # features that it lacks, for the report

    @property
    def label(self) -> str:
        return f"swap file in {self.directory}"


def open_swap_files(paths: Sequence[Path], capacity_bytes: int, system: System) -> list[SwapFile]:
    """Open one file in each directory, of equal sizes as far as the directories have room."""
    files: list[SwapFile] = []
    try:
        for path, share in zip(paths, _shares(paths, capacity_bytes, system), strict=True):
            files.append(open_swap_file(path, share, system))
    except BaseException:
        close_swap_files(files)
        raise
    return files


def _shares(paths: Sequence[Path], capacity_bytes: int, system: System) -> list[int]:
    """Divide the capacity equally; what a directory has no room for goes to the others."""
    free = [_free_bytes(path, system) for path in paths]
    if sum(free) < capacity_bytes:
        for path in paths:  # a directory that allows no file: raise that error instead
            os.close(_open(path, system)[0])
        found = ", ".join(f"{p} {format_size(f)}" for p, f in zip(paths, free, strict=True))
        raise CapacityError(
            f"disk store: {format_size(capacity_bytes)} ({capacity_bytes} bytes) are needed, "
            f"{format_size(sum(free))} ({sum(free)} bytes) are free: {found}; make room, add a "
            "directory, or keep more in host_memory"
        )
    shares = [0] * len(paths)
    left = -(-capacity_bytes // BLOCK_BYTES) * BLOCK_BYTES
    order = sorted(range(len(paths)), key=lambda index: free[index])
    for done, index in enumerate(order):  # the smallest first: the others share the rest
        fair = -(-left // (len(paths) - done) // BLOCK_BYTES) * BLOCK_BYTES
        shares[index] = max(BLOCK_BYTES, min(fair, free[index] - free[index] % BLOCK_BYTES))
        left -= shares[index]
    return shares


def _free_bytes(path: Path, system: System) -> int:
    try:
        return system.free_bytes(path)
    except OSError:
        return 1 << 62  # opening a file there will raise the error


def close_swap_files(files: list[SwapFile]) -> None:
    """Close the files and empty the list. Each leaves the list before it is closed, so that after
    an interruption another call closes the rest, none twice.
    """
    while files:
        file = files.pop()
        # A forked child may hold the descriptor, too, and must not keep the space on the drive.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fd, 0)
        os.close(file.fd)


def open_swap_file(directory: Path, nbytes: int, system: System) -> SwapFile:
    """Open a new file of `nbytes` in `directory`, which must exist. The caller closes its `fd`."""
    fd, unnamed = _open(directory, system)
    try:
        notes = [] if unnamed else ["the file had a name for a moment: no O_TMPFILE here"]
        # Reserve before the probe: the probe writes a block, and the flag it sets would stop a
        # reservation that the C library has to emulate.
        os.set_inheritable(fd, False)
        system.keep_in_place(fd)
        _reserve(fd, directory, nbytes, system)
        if not RESERVES:
            notes.append("room on the drive is not reserved: the system cannot")
        direct = system.probe_direct_io(fd)
        if direct.works:
            align = max(BLOCK_BYTES, direct.mem_align_bytes or 1, direct.offset_align_bytes or 1)
        else:
            align = 1
            notes.append("bytes pass through the page cache: no O_DIRECT here")
        return SwapFile(fd, directory, nbytes, align, tuple(notes))
    except BaseException:
        os.close(fd)
        raise


def _open(directory: Path, system: System) -> tuple[int, bool]:
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return system.open_unnamed(directory)
    except OSError as error:
        raise _refusal("open", directory, error) from error


def _reserve(fd: int, directory: Path, nbytes: int, system: System) -> None:
    try:
        free = system.free_bytes(directory)
        if nbytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        system.reserve(fd, nbytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CapacityError(
                f"disk store: {directory} must hold a file of {format_size(nbytes)} ({nbytes} "
                f"bytes) (EFBIG): {_file_limit()}; or add a directory, so that each has a smaller "
                "file, or keep more in host_memory"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"disk store: {directory} must hold {format_size(nbytes)} ({nbytes} bytes), "
                f"{format_size(free)} ({free} bytes) are free "
                f"({errno.errorcode[error.errno]}); make room, add a directory, or keep more in "
                "host_memory"
            ) from error
        raise _refusal("reserve", directory, error) from error


def _file_limit() -> str:
    """Say which limit forbids a file of this size, and how to lift it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "its file system has no files of that size; give a directory on another one"
    return (
        f"the limit of this process is {format_size(limit)} ({limit} bytes); raise it where the "
        "program is started (`ulimit -f unlimited`)"
    )


def _refusal(operation: str, directory: Path, error: OSError) -> StoreError:
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    remedies = {
        errno.ENOENT: "make the directory, or mount the drive",
        errno.ENOTDIR: "give the directory itself, not a file",
        errno.EROFS: "mount it for writing",
        errno.EACCES: "let your user write there",
        errno.EPERM: "let your user write there",
    }
    return StoreError(
        f"disk store: cannot {operation} a swap file in {directory}: {name} "
        f"({os.strerror(code)}); {remedies.get(code, 'see `offload doctor` for this directory')}",
        errno=code,
        operation=operation,
        file=str(directory),
    )
