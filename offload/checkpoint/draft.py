"""The directory of a checkpoint from its creation until it has its final name or is removed.

It has a hidden name, and an exclusive lock that the saver holds. It is made in the parent of its
final path, so that one rename publishes it. Missing parents are made, too, and are removed again if
the save fails.

Of several ranks the first makes it, and says where: the directory, and the files in it. The other
ranks check both before anything is written: each must see the very same ones, which it does on the
same node alone. If the first rank is lost, its lock on the directory is free, and what it had begun
is removed by the ranks that are left, or by the next save.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.checkpoint.disk import (
    MOST_NAME_BYTES,
    PART,
    CheckpointDisk,
    hidden_name,
    identity_of,
    is_ours,
    name_within,
    refusal,
    remove,
    told,
)
from offload.checkpoint.format.directory import CheckpointDirectory
from offload.checkpoint.output import OutputFile
from offload.core.config import format_size
from offload.core.errors import ConfigError, FormatError, OffloadError, StateError, StoreError
from offload.core.locks import nap
from offload.core.log import LOG
from offload.core.metrics import Metrics

_TRIES = 16  # of a new name: another save can remove each as a leftover before it is locked
_GONE_S = 1.0  # until the locks of a killed process are free
_GONE_STEP_S = 0.02


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a new checkpoint. Raises `ConfigError`, and changes nothing."""
    try:
        given = Path(os.fspath(path))
        encoded = os.fsencode(given.name)
        if isinstance(os.fspath(path), bytes) or b"\0" in os.fsencode(given):
            raise TypeError
    except (TypeError, ValueError) as error:
        raise ConfigError(f"path: expected that of a new directory, got {path!r}") from error
    if not encoded or given.name == ".." or given.name.startswith("."):
        raise ConfigError(f"path: expected one whose name is not hidden, got {str(path)!r}")
    if len(encoded) > MOST_NAME_BYTES:
        raise ConfigError(
            f"path: expected a name of {MOST_NAME_BYTES} bytes at most, got {len(encoded)}"
        )
    found = Path.cwd() / given
    if os.path.lexists(found):
        raise ConfigError(f"{found}: is there already; a save makes a new directory: give another")
    return found


def free_path(path: Path) -> Path:
    """Return `path`, or with `-2`, `-3`, ... at its end, if there is something there already."""
    found, count = path, 1
    while os.path.lexists(found):
        count += 1
        found = path.with_name(f"{path.name}-{count}")
    return found


class UnfinishedCheckpoint:
    """A checkpoint's directory before it is published. fd: its descriptor, as soon as it is locked.
    fds: those of the files in it that are being written. is_shared: other ranks write them, too.
    """

    def __init__(
        self, path: Path, disk: CheckpointDisk, metrics: Metrics, is_shared: bool = False
    ) -> None:
        self.path, self._disk, self._metrics, self._is_shared = path, disk, metrics, is_shared
        self.fds: list[int] = []
        self._made: list[tuple[CheckpointDirectory, str]] = []  # parents that were missing
        self._parents: list[CheckpointDirectory] = []
        self.hidden = ""
        self.fd = -1
        try:
            self.parent = self._open_parent()
            remove_leftovers(self.parent, disk, path.name)
            self._make()
        except BaseException:
            self.discard()
            raise

    # --- making -----------------------------------------------------------------------------------

    def _open_parent(self) -> CheckpointDirectory:
        """Open the parent; make it, and its parents, if they are missing."""
        missing: list[str] = []
        here = self.path.parent
        while not os.path.lexists(here):
            missing.append(here.name)
            here = here.parent
        try:
            parent = CheckpointDirectory(here)
        except (StoreError, FormatError) as error:
            if isinstance(error, StoreError) and error.errno != errno.ENOTDIR:
                raise
            raise ConfigError(f"{here}: expected a directory to save in: {error}") from error
        self._parents.append(parent)
        for name in reversed(missing):
            parent = self._make_parent(parent, name)
        return parent

    def _make_parent(self, parent: CheckpointDirectory, name: str) -> CheckpointDirectory:
        path = parent.path / name
        # It is there, if another process has made it in this moment.
        with told("mkdir", path), suppress(FileExistsError):
            self._disk.mkdir(parent.fd, name)
            self._made.append((parent, name))
        with told("fsync of directory", parent.path):
            self._disk.fsync_dir(parent.fd)
        self._parents.append(CheckpointDirectory(path))
        return self._parents[-1]

    def _make(self) -> None:
        """Make the hidden directory, and lock it."""
        for _ in range(_TRIES):
            self.hidden = hidden_name(self.path.name, PART)
            with told("mkdir", self.folder):
                self._disk.mkdir(self.parent.fd, self.hidden)
            # From here on another save may remove it: without a lock it is a leftover.
            with suppress(FormatError):
                self.directory = CheckpointDirectory(self.hidden, self.parent)
                locked = self.directory.try_lock()
                if locked is not False and self.directory.is_at(self.parent, self.hidden):
                    break
                self.directory.close()
        else:
            raise StateError(f"{self.parent.path}: others remove every directory made there")
        self.fd = self.directory.fd
        if locked is None:
            self._metrics.fall_back(
                f"checkpoints in {self.parent.path}",
                "no locks on directories: what a killed save leaves there is not removed",
            )
        with told("chmod", self.folder):
            self._disk.chmod(self.fd, 0o700)

    @property
    def folder(self) -> Path:
        return self.parent.path / self.hidden

    def open_file(self, name: str, nbytes: int) -> OutputFile:
        """Create a file with room for all of its bytes, past the page cache if that works."""
        path = self.path / name
        fd = self.open_new(name)
        self.fds.append(fd)
        try:
            self._disk.allocate(fd, nbytes)
        except OSError as error:
            found = os.fstatvfs(fd)
            free = found.f_frsize * found.f_bavail
            more = f": {format_size(nbytes)} ({nbytes} bytes) are needed, {format_size(free)} free"
            raise refusal("allocate", path, error, more) from error
        with told("open past the page cache", path):
            align = self._disk.go_direct(fd)
        if align == 1:
            self._metrics.fall_back(
                f"checkpoints in {self.path.parent}",
                "bytes pass through the page cache: no O_DIRECT here",
            )
        if not self._is_shared:
            return OutputFile(fd, align, str(path))
        with told("open", path):  # again, for blocks in which other ranks have bytes, too
            self.fds.append(self._disk.open_again(self.fd, name))
        return OutputFile(fd, align, str(path), self.fds[-1])

    def open_new(self, name: str) -> int:
        """Create a file in the directory. The caller closes it."""
        with told("open", self.path / name):
            fd = self._disk.open_new(self.fd, name)
        try:
            with told("chmod", self.path / name):
                self._disk.chmod(fd, 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd

    # --- the end ----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Give the directory its final name, durably."""
        with told("rename", self.path):
            self._disk.rename(self.parent.fd, self.hidden, self.path.name)
        self._disk.hook("renamed")
        with told("fsync of directory", self.parent.path):
            self._disk.fsync_dir(self.parent.fd)
        self._disk.hook("parent synced")

    def release(self) -> None:
        """Unlock and close the directory, and keep the parents that were made for it."""
        if self.fd >= 0:
            self.fd = -1
            self.directory.close()
        self._made.clear()
        for parent in self._parents:
            parent.close()

    def discard(self) -> None:
        """Remove everything that was made. Idempotent. What cannot be removed is left to the next
        save.
        """
        try:
            if self.fd >= 0:
                self._remove()
            elif self.hidden:  # it was made, but could not be opened
                with suppress(FileNotFoundError):
                    self._disk.rmdir(self.parent.fd, self.hidden)
            while self._made:
                parent, name = self._made.pop()
                self._disk.rmdir(parent.fd, name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or self.fd >= 0:
                LOG.warning(
                    "checkpoint %s: the save has failed, and %s could not be removed: %s; the next "
                    "save there tries again",
                    self.path,
                    self.hidden or "a directory that it made",
                    error,
                )
        finally:
            self.release()

    def _remove(self) -> None:
        if self.directory.is_at(self.parent, self.path.name):  # it was renamed, then this failed
            with suppress(OSError):
                self._disk.rename(self.parent.fd, self.path.name, self.hidden)
        for name in (self.hidden, self.path.name):
            if self.directory.is_at(self.parent, name):
                remove(self._disk, self.parent, name, self.directory)


def remove_leftovers(parent: CheckpointDirectory, disk: CheckpointDisk, name: str) -> None:
    """Remove the directories that dead savers have left in `parent`.

    Removes only a directory with a hidden name of a save, whose lock is free, and which has nothing
    but files of a save in it. Raises `ConfigError` if a live saver of the same `name` is found.
    """
    for hidden in parent.names():
        stands_for = name_within(hidden)
        if stands_for is None:
            continue
        try:
            directory = CheckpointDirectory(hidden, parent)
        except (FormatError, StoreError):  # gone, or no directory
            continue
        with directory:
            locked = directory.try_lock()
            if locked is False and stands_for == name and hidden.endswith(PART):
                raise ConfigError(
                    f"{directory.path.with_name(name)}: another save is under way there; give "
                    "another path, or save on one rank only where each has the whole"
                )
            try:
                files = os.listdir(directory.fd)
                if locked and directory.is_at(parent, hidden) and all(map(is_ours, files)):
                    remove(disk, parent, hidden, directory, files)
            except OSError as error:
                LOG.warning("checkpoint: %s could not be removed: %s", directory.path, error)


# --- other ranks ----------------------------------------------------------------------------------


class SharedDraft:
    """The directory of the first rank, as an `UnfinishedCheckpoint` that only takes files. folder:
    its path; fds: this rank's descriptors of files in it.
    """

    def __init__(self, path: Path, invitation: Mapping[str, Any], disk: CheckpointDisk) -> None:
        self.path, self._disk = path, disk
        self._files: Mapping[str, Sequence[int]] = invitation["files"]
        self.fds: list[int] = []
        self.folder = Path(str(invitation["directory"]))
        if self.folder.parent != path.parent or name_within(self.folder.name) != path.name:
            raise StateError(f"save of {path}: the first rank saves in {self.folder}")
        self.directory = CheckpointDirectory(self.folder)
        try:
            _check_same(self.folder, self.directory.fd, invitation["identity"], stat.S_ISDIR)
        except BaseException:
            self.release()
            raise

    def open_file(self, name: str, nbytes: int) -> OutputFile:
        """Open a file that the first rank has made."""
        if name not in self._files:
            raise StateError(f"save of {self.path}: the first rank has no file {name}")
        align, *identity = self._files[name]
        path = self.folder / name
        fd = self._open(path, identity, nbytes)
        if align > 1:
            with told("open past the page cache", path):
                self._disk.join_direct(fd)
        return OutputFile(fd, align, str(path), self._open(path, identity, nbytes))

    def _open(self, path: Path, identity: Sequence[int], nbytes: int) -> int:
        with told("open", path):
            fd = self._disk.open_again(self.directory.fd, path.name)
        self.fds.append(fd)
        _check_same(path, fd, identity, stat.S_ISREG)
        found = os.fstat(fd)
        if found.st_size < nbytes or found.st_nlink != 1:
            raise StateError(
                f"{path}: has {found.st_size} bytes and {found.st_nlink} names, expected "
                f"{nbytes} or more, and one; another process has changed it"
            )
        return fd

    def discard(self) -> None:
        """Close the directory; remove it if the first rank is lost. While that lives it holds the
        lock, and removes everything itself.
        """
        self.release()
        sweep(self.path, self._disk)

    def release(self) -> None:
        """Close the directory. Idempotent."""
        self.directory.close()


def sweep(path: Path, disk: CheckpointDisk | None = None) -> None:
    """Remove what a lost first rank has begun for `path`. Waits up to `_GONE_S` for its lock."""
    until_s = time.monotonic() + _GONE_S
    while time.monotonic() < until_s:
        with suppress(OffloadError, OSError), CheckpointDirectory(path.parent) as parent:
            remove_leftovers(parent, disk or CheckpointDisk(), path.name)
            return  # it is gone, or the log has why not
        nap(_GONE_STEP_S)  # the first rank lives, and removes it itself


def _check_same(path: Path, fd: int, identity: Sequence[int], is_kind: Any) -> None:
    found = os.fstat(fd)
    if identity_of(fd) != list(identity) or not is_kind(found.st_mode):
        raise StateError(
            f"{path}: is not the one that the first rank has made; all ranks must be on one node "
            "and see the same file system"
        )
    if found.st_uid != os.geteuid():
        raise StateError(
            f"{path}: belongs to user {found.st_uid}, this rank runs as {os.geteuid()}; run all "
            "ranks as one user"
        )
