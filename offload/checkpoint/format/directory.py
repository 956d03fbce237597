"""A checkpoint's directory: the only place that opens the files of one for reading.

Names come from files that nobody vouches for. So a name is one of plain letters, without a way out;
it is opened from the directory's own descriptor; and what is there is a regular file with this one
name: no link of either kind, no pipe, no device. The path that the caller gives may lead over links
as it likes: it is the caller's own. Nothing below it may.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from offload.checkpoint.format.manifest import (
    MANIFEST,
    SHARD_NAME,
    Manifest,
    claimed_number,
    claimed_version,
)
from offload.core.errors import ConfigError, CorruptionError, FormatError, StoreError
from offload.core.format_limits import MOST_FILE_NAME_CHARS, MOST_MANIFEST_BYTES, MOST_NAMES
from offload.core.strict_json import printable, shown

_NAME: Final = re.compile(rf"(?=[^.])[A-Za-z0-9._-]{{1,{MOST_FILE_NAME_CHARS}}}", re.ASCII)
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A name has one part, so that with O_NOFOLLOW nothing is left that could lead elsewhere. Not to
# hang where it is a pipe: O_NONBLOCK.
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_BEGIN_BYTES: Final = 256
_NOBODYS: Final = "lost+found"  # of a file system; nobody may look into it


class CheckpointDirectory:
    """One directory, open until `close`; also for `with`."""

    def __init__(
        self, path: str | os.PathLike[str], parent: CheckpointDirectory | None = None
    ) -> None:
        """parent: `path` is a name in it, and no link."""
        self.path: Path = Path(path) if parent is None else parent.path / path
        try:
            if parent is None:
                fd = os.open(self.path, _OPEN_DIRECTORY)
            else:
                fd = os.open(path, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent.fd)
        except (OSError, ValueError) as error:
            raise _refusal(self.path, "open", error, below=parent is not None) from error
        self.fd: int = fd
        self._fds = [fd]
        weakref.finalize(self, _close, self._fds).atexit = False

    def names(self) -> list[str]:
        """What is there, hidden or not, sorted."""
        try:
            names = os.listdir(self.fd)
        except OSError as error:
            raise _refusal(self.path, "list", error, below=False) from error
        if len(names) > MOST_NAMES:
            raise FormatError(
                f"{printable(self.path)}: has {len(names)} files, expected {MOST_NAMES} at most"
            )
        return sorted(names)

    def open(self, name: str) -> int:
        """A descriptor to read a regular file of this directory. The caller closes it."""
        path = self.path / check_name(name)
        try:
            # Looked at first, because to open a device may already do something.
            _check_regular(path, os.stat(name, dir_fd=self.fd, follow_symlinks=False))
            fd = os.open(name, _OPEN_FILE, dir_fd=self.fd)
        except OSError as error:
            raise _refusal(path, "open", error, below=True) from error
        try:
            _check_regular(path, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """As `open`, closed at the end of the block."""
        fd = self.open(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        """Bytes of a regular file, without opening it."""
        path = self.path / check_name(name)
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError as error:
            raise _refusal(path, "look at", error, below=True) from error
        _check_regular(path, found)
        return found.st_size

    def read_manifest(self) -> Manifest:
        """Raises `FormatError` or `CorruptionError`, with the file's name."""
        path = self.path / MANIFEST
        with self.opened(MANIFEST) as fd:
            nbytes = os.fstat(fd).st_size
            if nbytes > MOST_MANIFEST_BYTES:
                raise FormatError(
                    f"{printable(path)}: has {nbytes} bytes, expected {MOST_MANIFEST_BYTES} at most"
                )
            text = _read_whole(fd, nbytes, path)
        try:
            return Manifest.parse(text)
        except FormatError as error:
            raise FormatError(f"{printable(path)}: {error}") from error.__cause__
        except CorruptionError as error:
            raise CorruptionError(
                f"{printable(path)}: {error}", operation="verify", file=str(path)
            ) from error.__cause__

    def check_files(self, manifest: Manifest) -> None:
        """Every file is there and has its size."""
        for name, nbytes in manifest.files.items():
            found = self.size(name)
            if found != nbytes:
                raise FormatError(
                    f"{printable(self.path / name)}: has {found} bytes, expected {nbytes}; take "
                    "another checkpoint"
                )

    def claimed_number(self, *, strict: bool = False) -> int | None:
        """What its manifest says is its number, without a look at the rest; None: it has none, or
        it cannot be read. strict: what the system refuses is raised.
        """
        return claimed_number(self._begin(strict))

    def refuse_damaged_begin(self) -> None:
        """`CorruptionError` where the manifest does not begin as one, but belongs to shards."""
        names = self.names()
        if MANIFEST in names and any(SHARD_NAME.fullmatch(name) for name in names):
            path = self.path / MANIFEST
            raise CorruptionError(
                f"{printable(path)}: does not begin as a manifest of ours, but stands beside files "
                "of a checkpoint: it is not what was written",
                operation="verify",
                file=str(path),
            )

    def claimed_version(self) -> int | None:
        """The same for the version of the format."""
        return claimed_version(self._begin())

    def _begin(self, strict: bool = False) -> bytes:
        try:
            with self.opened(MANIFEST) as fd:
                return os.pread(fd, _BEGIN_BYTES, 0)
        except FormatError:
            return b""
        except StoreError:
            if strict:
                raise
            return b""
        except OSError as error:
            if strict:
                raise _refusal(self.path / MANIFEST, "read", error, below=True) from error
            return b""

    def close(self) -> None:
        """Idempotent."""
        _close(self._fds)

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_name(name: str) -> str:
    """A name that can only be that of a file in its directory, else `FormatError`."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise FormatError(
            f"expected the name of a file, of up to {MOST_FILE_NAME_CHARS} letters, digits and "
            f"._-, got {shown(name)}"
        )
    return name


def read_into(fd: int, offset: int, memory: Any, path: Path) -> None:
    """Fill `memory` with what is at `offset`. path: for messages."""
    view = memoryview(memory).cast("B")
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise _refusal(path, "read", error, below=True, offset=offset + done) from error
        if not got:
            raise FormatError(
                f"{printable(path)}: ends at {offset + done}, expected {len(view) - done} bytes "
                "more; it was cut short while it was read"
            )
        done += got


def _read_whole(fd: int, nbytes: int, path: Path) -> bytes:
    """Without a second copy of it."""
    try:
        text = os.pread(fd, nbytes, 0)
    except OSError as error:
        raise _refusal(path, "read", error, below=True, offset=0) from error
    if len(text) < nbytes:  # a signal came, or it was cut short
        rest = bytearray(nbytes - len(text))
        read_into(fd, len(text), rest, path)
        text += rest
    return text


# --- which checkpoint -----------------------------------------------------------------------------


def list_numbers(path: str | os.PathLike[str]) -> dict[str, int]:
    """The directories below `path` that look like checkpoints, with the numbers that they claim.

    Hidden names (they begin with ".") and links are never looked at.
    """
    with CheckpointDirectory(path) as parent:
        return _numbers_below(parent)


def _numbers_below(
    parent: CheckpointDirectory, passed: MutableMapping[str, str] | None = None
) -> dict[str, int]:
    """passed: for `find_newest`, which must not miss the newest. So what the system refuses is
    raised, and what was a checkpoint is told.
    """
    found = {}
    for name in parent.names():
        if name.startswith(".") or name == _NOBODYS:
            continue
        try:
            with CheckpointDirectory(name, parent) as directory:
                number = directory.claimed_number(strict=passed is not None)
                if number is None and passed is not None and name not in passed:
                    directory.refuse_damaged_begin()
        except FormatError:
            continue
        except CorruptionError as error:
            assert passed is not None
            pass_over(name, error, passed)
            continue
        except StoreError:
            if passed is not None:
                raise
            continue
        if number is not None:
            found[name] = number
    return found


def find_newest(
    path: str | os.PathLike[str], passed: MutableMapping[str, str] | None = None
) -> Path:
    """`path` itself if it is a checkpoint, else the newest whole one below it, by number.

    Whole: its manifest is right and its files are there with their sizes; their bytes are not read.
    One that is not whole, or of another version, is passed over with a warning. `ConfigError` where
    there is none at all, `FormatError` where none is whole, `StoreError` where the system does not
    let us see. passed: names of those that are passed over already, and why; grows.
    """
    try:
        with CheckpointDirectory(path) as directory:
            if MANIFEST in directory.names():
                directory.check_files(directory.read_manifest())
                return Path(path)
            return _find_below(directory, {} if passed is None else passed)
    except StoreError as error:
        if isinstance(error, CorruptionError) or error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise ConfigError(
            f"{printable(path)}: expected the directory of a checkpoint: {error}"
        ) from error


def _find_below(parent: CheckpointDirectory, passed: MutableMapping[str, str]) -> Path:
    numbers = _numbers_below(parent, passed)
    for name in sorted(numbers, key=lambda name: (numbers[name], name), reverse=True):
        if name in passed:
            continue
        try:
            with CheckpointDirectory(name, parent) as directory:
                directory.check_files(directory.read_manifest())
        except (FormatError, CorruptionError) as error:
            pass_over(name, error, passed)
        else:
            return parent.path / name
    if passed:
        wrong = list(passed.values())
        raise FormatError(
            f"{printable(parent.path)}: no checkpoint there is whole: {'; '.join(wrong[:3])}"
        )
    raise ConfigError(
        f"{printable(parent.path)}: is no checkpoint (it has no {MANIFEST}), and has none below; "
        "give the directory that a save has made, or the one it is in"
    )


def pass_over(name: str, error: BaseException, passed: MutableMapping[str, str]) -> None:
    """Tell it: who goes on from an older one should know."""
    passed[name] = str(error)
    warnings.warn(f"checkpoint {printable(name)} is passed over: {error}", stacklevel=2)


# --- refusals -------------------------------------------------------------------------------------


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise FormatError(f"{printable(path)}: expected a regular file, got {kind}")
    if found.st_nlink != 1:
        raise FormatError(
            f"{printable(path)}: expected a file with one name, got one with {found.st_nlink} "
            "hard links; copy the checkpoint"
        )


_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _refusal(
    path: Path,
    operation: str,
    error: OSError | ValueError,
    *,
    below: bool,
    offset: int | None = None,
) -> FormatError | StoreError:
    """The error to raise. below: a checkpoint should have it, so that it is the checkpoint which is
    wrong where something else is there, or nothing.
    """
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number else str(error)
    message = f"{printable(path)}: cannot {operation} it: {why}"
    if below and number in _NOT_THERE:
        return FormatError(f"{message}; take another checkpoint")
    return StoreError(
        f"{message}; see that it is there and may be read",
        errno=number,
        operation=operation,
        file=str(path),
        offset_bytes=offset,
    )


def _close(fds: list[int]) -> None:
    while fds:
        with suppress(OSError):
            os.close(fds.pop())
