"""Facts about one directory: whether it can hold swap files, on which file system and drive.

As in `offload.core.host_facts`, a fact is a value or None, and no function raises for a missing
one. What the kernel does not report is tried: the probe opens an unnamed file in the directory and
writes one block to it; the file is gone when the probe returns, also when the process is killed.
The directory itself is never created.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from offload.core.host_facts import ROOT, name_errno, read_int, read_text

RAM_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_PROBED_ALIGNMENTS = ((512, 512), (4096, 4096))  # memory, offset; the first that works counts
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_OFFSET = 0x98  # stx_dio_mem_align, then stx_dio_offset_align, both u32


@dataclass(frozen=True)
class Mount:
    """A mount: the fields of one line of /proc/self/mountinfo that the engine needs."""

    point: str
    fs_type: str
    source: str  # "/dev/nvme0n1p1", "overlay", "server:/export"
    device: str  # "major:minor"


@dataclass(frozen=True)
class Drive:
    """The block device below a file system."""

    name: str  # "nvme0n1"
    rotational: bool | None  # virtual drives often report True on any hardware
    model: str | None


@dataclass(frozen=True)
class DirectIo:
    """The result of the O_DIRECT probe: whether it works, and which alignment it needs.

    Memory addresses must be multiples of `mem_align_bytes`, file offsets of `offset_align_bytes`.
    """

    works: bool | None  # None: could not be tried
    mem_align_bytes: int | None = None
    offset_align_bytes: int | None = None


@dataclass(frozen=True)
class DirectoryFacts:
    """The facts about a directory that may hold swap files. An unknown fact is None."""

    path: Path
    exists: bool  # False only if the system says so; `error` names other obstacles
    is_directory: bool
    writable: bool
    error: str | None = None  # name of the errno that stopped the probe
    mount: Mount | None = None
    drive: Drive | None = None
    ram_backed: bool | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None  # for users other than root
    o_tmpfile: bool | None = None
    direct_io: DirectIo = DirectIo(None)


def read_directory(path: Path, root: Path = ROOT) -> DirectoryFacts:
    """Read all facts about `path`. Writes one block to an unnamed file there; leaves no file."""
    # Not Path.resolve: it raises for a loop of links.
    path = Path(os.path.realpath(path))
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        exists = error.errno not in (errno.ENOENT, errno.ENOTDIR)
        return DirectoryFacts(path, exists, False, False, error=_name_of(error))
    if not is_directory:
        return DirectoryFacts(path, True, False, False, error="ENOTDIR")
    mount = find_mount(path, root)
    drive = find_drive(mount, root) if mount else None
    total_bytes, free_bytes = _read_space(path)
    facts = DirectoryFacts(
        path,
        exists=True,
        is_directory=True,
        writable=False,
        mount=mount,
        drive=drive,
        ram_backed=_is_ram_backed(mount, drive),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
    )
    return _probe(facts)


def _name_of(error: OSError) -> str:
    return name_errno(error.errno or 0)


def _read_space(path: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


# --- mount and drive ---------------------------------------------------------------------------


def find_mount(path: Path, root: Path = ROOT) -> Mount | None:
    """Find the mount that holds the absolute `path`: the longest prefix; the last of equals, which
    hides the earlier ones.
    """
    best: Mount | None = None
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount = _parse_mount(line)
        if mount is None:
            continue
        inside = f"{path}/".startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _parse_mount(line: str) -> Mount | None:
    # "id parent major:minor root point options [tags] - type source options"
    left, _, right = line.partition(" - ")
    head, tail = left.split(" "), right.split(" ")
    if len(head) < 6 or len(tail) < 2:
        return None
    return Mount(_unescape(head[4]), _unescape(tail[0]), _unescape(tail[1]), head[2])


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of white space, `#` and the backslash."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def find_drive(mount: Mount, root: Path = ROOT) -> Drive | None:
    """Find the block device of a mount, the drive of a partition; None if sysfs shows none."""
    node = root / "sys/dev/block" / mount.device
    if not node.exists():  # btrfs and some others use virtual numbers, but name the device
        if not mount.source.startswith("/dev/"):
            return None
        node = root / "sys/class/block" / Path(os.path.realpath(root / mount.source[1:])).name
        if not node.exists():
            return None
    node = Path(os.path.realpath(node))
    if (node / "partition").exists():
        node = node.parent
    rotational = read_int(node / "queue/rotational")
    models = sorted(_collect_models(node))
    return Drive(
        node.name,
        None if rotational is None else rotational != 0,
        " + ".join(models) if models else None,
    )


def _collect_models(node: Path, depth: int = 8) -> set[str]:
    """Collect the models of the drives below a device. RAID, LVM and encryption list their drives
    in `slaves`.
    """
    model = read_text(node / "device/model")
    if model:
        return {model}
    found: set[str] = set()
    try:
        slaves = sorted((node / "slaves").iterdir()) if depth else []
    except OSError:
        slaves = []
    for slave in slaves:
        below = Path(os.path.realpath(slave))
        below = below.parent if (below / "partition").exists() else below
        found |= _collect_models(below, depth - 1)
    return found


def _is_ram_backed(mount: Mount | None, drive: Drive | None) -> bool | None:
    if mount is None:
        return None
    on_ram_drive = drive is not None and re.fullmatch(r"(zram|ram)\d+", drive.name) is not None
    return mount.fs_type in RAM_FILE_SYSTEMS or on_ram_drive


# --- probes ------------------------------------------------------------------------------------


def _probe(facts: DirectoryFacts) -> DirectoryFacts:
    """Add the facts that need an open file: writable, O_TMPFILE, O_DIRECT."""
    try:
        fd, o_tmpfile = open_unnamed(facts.path)
    except OSError as error:
        return replace(facts, error=_name_of(error))
    try:
        direct_io = probe_direct_io(fd)
    finally:
        os.close(fd)
    return replace(facts, writable=True, o_tmpfile=o_tmpfile, direct_io=direct_io)


def open_unnamed(directory: Path) -> tuple[int, bool]:
    """Open a new unnamed file for reading and writing, mode 0600. The caller closes it.

    Also return whether O_TMPFILE made it; otherwise it had a name for a moment. Raises OSError when
    neither way works.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600), True
        except OSError:
            pass  # EOPNOTSUPP, EISDIR or EINVAL, by kernel; another error recurs in the next try
    name = directory / f".offload-probe-{secrets.token_hex(8)}"
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(name)
    except OSError:
        os.close(fd)
        raise
    return fd, False


def probe_direct_io(fd: int) -> DirectIo:
    """Switch the file to O_DIRECT, ask for its alignment, and verify the answer by a write.

    The flag is set on an open file because open(O_CREAT | O_DIRECT) can fail and leave the file.
    """
    if not hasattr(os, "O_DIRECT"):
        return DirectIo(False)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return DirectIo(False)
    declared = read_dio_alignment(fd)
    if declared and 0 in declared:  # the kernel reports 0 for a file without direct I/O
        return DirectIo(False)
    works: bool | None = False
    candidates = (declared, *_PROBED_ALIGNMENTS) if declared else _PROBED_ALIGNMENTS
    for mem_align_bytes, offset_align_bytes in candidates:
        works = _try_direct_write(fd, mem_align_bytes, offset_align_bytes)
        if works:
            return DirectIo(True, mem_align_bytes, offset_align_bytes)
        if works is None:
            break
    return DirectIo(works)


def read_dio_alignment(fd: int) -> tuple[int, int] | None:
    """Return the memory and offset alignment from statx (Linux 6.1 on).

    (0, 0): the file has no direct I/O; None: statx does not report it.
    """
    try:
        statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    except OSError:
        return None
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    mem_align_bytes, offset_align_bytes = struct.unpack_from("=II", buffer, _STATX_DIO_OFFSET)
    return mem_align_bytes, offset_align_bytes


def _try_direct_write(fd: int, mem_align_bytes: int, offset_align_bytes: int) -> bool | None:
    """Write one unit from memory that is aligned no better than asked; return whether that worked.
    None: it failed for a reason other than alignment or missing support.
    """
    nbytes = offset_align_bytes
    with mmap.mmap(-1, 2 * mem_align_bytes + nbytes) as area:
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        # An odd multiple of the alignment: better aligned memory would prove nothing.
        start = (mem_align_bytes - address) % (2 * mem_align_bytes)
        with memoryview(area)[start : start + nbytes] as unit:
            try:
                return os.pwrite(fd, unit, offset_align_bytes) == nbytes
            except OSError as error:
                return False if error.errno in (errno.EINVAL, errno.EOPNOTSUPP) else None
