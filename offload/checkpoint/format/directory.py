"""A checkpoint's directory: the only code that opens the files of a checkpoint for reading.

File names are read from files that are not trusted. So a name is one of plain letters, without a
path separator; it is opened relative to the directory's own descriptor; and it is a regular file
with this one name: no symbolic or hard link, no pipe, no device. The path that the caller gives may
lead over any links: it is the caller's own. Nothing below it may.
"""

from __future__ import annotations

import errno
import fcntl
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
)
from offload.core.errors import ConfigError, CorruptionError, FormatError, StoreError
from offload.core.format_limits import MOST_FILE_NAME_CHARS, MOST_MANIFEST_BYTES, MOST_NAMES
from offload.core.portable import close_fds, refused
from offload.core.strict_json import printable, shown

_NAME: Final = re.compile(rf"(?=[^.])[A-Za-z0-9._-]{{1,{MOST_FILE_NAME_CHARS}}}", re.ASCII)
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A name is a single path component, so with O_NOFOLLOW it cannot lead elsewhere. O_NONBLOCK: the
# open does not hang if the name is a pipe.
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_BEGIN_BYTES: Final = 256
_NO_BEGIN: Final = (
    "does not begin like a manifest of this format, but stands beside files of a checkpoint: it is "
    "not what was written"
)
_NOBODYS: Final = "lost+found"  # the file system's own; users may not look into it


class CheckpointDirectory:
    """A directory that is open until `close`; also a context manager. Who writes, reads or removes
    a checkpoint holds a lock on it.
    """

    def __init__(
        self, path: str | os.PathLike[str], parent: CheckpointDirectory | None = None
    ) -> None:
        """Open the directory. parent: `path` is a name in it, and must not be a link."""
        self.path: Path = Path(path) if parent is None else parent.path / path
        try:
            if parent is None:
                fd = os.open(self.path, _OPEN_DIRECTORY)
            else:
                fd = os.open(path, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent.fd)
        except (OSError, ValueError) as error:
            raise _refusal(self.path, "open", error, below=parent is not None) from error
        self.fd: int = fd
        self._fds, self._is_locked = [fd], False
        weakref.finalize(self, close_fds, self._fds).atexit = False

    def try_lock(self, shared: bool = False) -> bool | None:
        """Take the lock until `close`; return whether it was free. None: no locks exist here."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        self._is_locked = True
        return True

    def is_at(self, parent: CheckpointDirectory, name: str) -> bool:
        """Return whether `name` in `parent` is this very directory."""
        try:
            found = os.stat(name, dir_fd=parent.fd, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))

    def names(self) -> list[str]:
        """Return all names in the directory, hidden ones included, sorted."""
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
        """Open a regular file of this directory for reading. The caller closes the descriptor."""
        self.size(name, "open")  # first, because opening a device may already do something
        path = self.path / name
        try:
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
        """Keep a file open, as `open` does, while the block runs."""
        fd = self.open(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def size(self, name: str, operation: str = "look at") -> int:
        """Return the size of a regular file in bytes, without opening it. operation: for errors."""
        path = self.path / check_name(name)
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError as error:
            raise _refusal(path, operation, error, below=True) from error
        _check_regular(path, found)
        return found.st_size

    def read_manifest(self) -> Manifest:
        """Read and check the manifest. Raises `FormatError` or `CorruptionError`, with its path."""
        path = self.path / MANIFEST
        with self.opened(MANIFEST) as fd:
            nbytes = os.fstat(fd).st_size
            if nbytes > MOST_MANIFEST_BYTES:
                raise FormatError(
                    f"{printable(path)}: has {nbytes} bytes, expected {MOST_MANIFEST_BYTES} at most"
                )
            text = bytearray(nbytes)
            read_into(fd, 0, text, path)
        try:
            return Manifest.parse(text)
        except FormatError as error:
            raise FormatError(f"{printable(path)}: {error}") from error.__cause__
        except CorruptionError as error:
            raise CorruptionError(
                f"{printable(path)}: {error}", operation="verify", file=str(path)
            ) from error.__cause__

    def read_whole(self) -> Manifest:
        """Read the manifest, and check that every file is there and has its size."""
        manifest = self.read_manifest()
        for name, nbytes in manifest.files.items():
            found = self.size(name)
            if found != nbytes:
                raise FormatError(
                    f"{printable(self.path / name)}: has {found} bytes, expected {nbytes}; take "
                    "another checkpoint"
                )
        return manifest

    def begin_of_manifest(self) -> bytes:
        """Return the manifest's first bytes, which claim its version and number; none, if there is
        no manifest. Raises `StoreError` if the system refuses the read.
        """
        with suppress(FormatError), self.opened(MANIFEST) as fd:
            try:
                return os.pread(fd, _BEGIN_BYTES, 0)
            except OSError as error:
                path = self.path / MANIFEST
                raise _refusal(path, "read", error, below=True, offset=0) from error
        return b""

    def has_shards(self) -> bool:
        """Return whether there are shards, and a manifest of any kind."""
        names = self.names()
        return MANIFEST in names and any(SHARD_NAME.fullmatch(name) for name in names)

    def close(self) -> None:
        """Unlock and close the directory. Idempotent."""
        if self._is_locked:
            self._is_locked = False
            with suppress(OSError):  # closing is not enough if a forked child shares it
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        close_fds(self._fds)

    def __enter__(self) -> CheckpointDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_name(name: str) -> str:
    """Return `name` if it can only be a file in its directory; otherwise raise `FormatError`."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise FormatError(
            f"expected the name of a file, of up to {MOST_FILE_NAME_CHARS} letters, digits and "
            f"._-, got {shown(name)}"
        )
    return name


def read_into(fd: int, offset: int, memory: Any, path: Path) -> None:
    """Fill `memory` with the bytes of the file from `offset` on. path: for messages."""
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


# --- which checkpoint -----------------------------------------------------------------------------


def list_numbers(
    parent: CheckpointDirectory, passed: MutableMapping[str, str] | None = None
) -> dict[str, int]:
    """Return the directories in `parent` that look like checkpoints, with the numbers they claim,
    newest first.

    Skips hidden names (they begin with ".") and links. passed: for `find_newest`, which must not
    miss the newest checkpoint. So errors of the system are raised then, and a checkpoint whose
    manifest has a damaged beginning is passed over with a warning.
    """
    found = {}
    for name in parent.names():
        if name.startswith(".") or name == _NOBODYS:
            continue
        try:
            with CheckpointDirectory(name, parent) as directory:
                number = claimed_number(directory.begin_of_manifest())
                if number is not None:
                    found[name] = number
                elif passed is not None and name not in passed and directory.has_shards():
                    path = printable(directory.path / MANIFEST)
                    pass_over(name, f"{path}: {_NO_BEGIN}", passed)
        except FormatError:
            continue
        except StoreError:
            if passed is not None:
                raise
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0]), reverse=True))


def find_newest(
    path: str | os.PathLike[str], passed: MutableMapping[str, str] | None = None
) -> Path:
    """Return `path` itself if it is a checkpoint, else the newest whole one below it, by number.

    Whole: its manifest is right and its files are there with their sizes; their bytes are not read.
    A checkpoint below that is not whole, or of another version, is passed over with a warning.
    Raises `ConfigError` if there is none at all, `FormatError` if none is whole, `StoreError` if
    the system refuses to read. passed: the names that are passed over already, and why; grows.
    """
    try:
        with CheckpointDirectory(path) as directory:
            if MANIFEST in directory.names():
                directory.read_whole()
                return Path(path)
            return _find_below(directory, {} if passed is None else passed)
    except StoreError as error:
        if isinstance(error, CorruptionError) or error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise ConfigError(
            f"{printable(path)}: expected the directory of a checkpoint: {error}"
        ) from error


def _find_below(parent: CheckpointDirectory, passed: MutableMapping[str, str]) -> Path:
    for name in list_numbers(parent, passed):
        if name in passed:
            continue
        try:
            with CheckpointDirectory(name, parent) as directory:
                directory.read_whole()
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


def pass_over(name: str, why: object, passed: MutableMapping[str, str]) -> None:
    """Note why a checkpoint is passed over, and warn the user, who goes on from an older one."""
    passed[name] = str(why)
    warnings.warn(f"checkpoint {printable(name)} is passed over: {why}", stacklevel=2)


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
    """Return the error to raise. below: the checkpoint should have the file, so that a missing one,
    or one of another kind, is a `FormatError` of the checkpoint.
    """
    if below and isinstance(error, OSError) and error.errno in _NOT_THERE:
        return FormatError(str(refused(path, operation, error, remedy="take another checkpoint")))
    return refused(path, operation, error, offset=offset)
