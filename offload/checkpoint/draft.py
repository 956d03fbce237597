"""The directory of a checkpoint from its creation until it has its final name or is removed.

It has a hidden name, and an exclusive lock that the saver holds. It is made in the parent of its
final path, so that one rename publishes it. Missing parents are made, too, and are removed again if
the save fails.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from offload.checkpoint.disk import CheckpointDisk, refusal, told
from offload.checkpoint.format.directory import CheckpointDirectory
from offload.checkpoint.output import OutputFile
from offload.checkpoint.staging_dir import (
    MOST_NAME_BYTES,
    PART,
    hidden_name,
    is_ours,
    leads_to,
    name_within,
    open_directory,
    remove,
    try_lock,
)
from offload.core.config import format_size
from offload.core.errors import ConfigError, FormatError, StateError, StoreError
from offload.core.log import LOG
from offload.core.metrics import Metrics

_TRIES = 16  # of a new name: another save can remove each as a leftover before it is locked


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


class UnfinishedCheckpoint:
    """A checkpoint's directory before it is published. fd: the descriptor of the directory. fds:
    those of the files in it that are being written. is_shared: other ranks write them, too.
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
        with told("mkdir", path):
            self._made.append((parent, name))
            try:
                self._disk.mkdir(parent.fd, name)
            except FileExistsError:  # another process has made it in this moment
                self._made.pop()
            except OSError:
                self._made.pop()
                raise
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
                # Between the two calls another save may remove it: without a lock it is a leftover.
                with suppress(FileNotFoundError):
                    self.fd = open_directory(self.parent.fd, self.hidden)
            if self.fd >= 0:
                locked = try_lock(self.fd)
                if locked is not False and leads_to(self.parent.fd, self.hidden, self.fd):
                    break
                os.close(self.fd)
                self.fd = -1
        else:
            raise StateError(f"{self.parent.path}: others remove every directory made there")
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
            fd, self.fd = self.fd, -1
            with suppress(OSError):  # closing is not enough if a forked child shares it
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
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
        dir_fd = self.parent.fd
        if leads_to(dir_fd, self.path.name, self.fd):  # it was renamed, but publishing failed
            with suppress(OSError):
                self._disk.rename(dir_fd, self.path.name, self.hidden)
        for name in (self.hidden, self.path.name):
            if leads_to(dir_fd, name, self.fd):
                remove(self._disk, dir_fd, name, self.fd)


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
            fd = open_directory(parent.fd, hidden)
        except OSError:  # gone, or no directory
            continue
        try:
            locked = try_lock(fd)
            if locked is False and stands_for == name and hidden.endswith(PART):
                raise ConfigError(
                    f"{parent.path / name}: another save is under way there; give another path, or "
                    "save on one rank only where each has the whole"
                )
            files = os.listdir(fd)
            if locked and leads_to(parent.fd, hidden, fd) and all(map(is_ours, files)):
                remove(disk, parent.fd, hidden, fd, files)
        except OSError as error:
            LOG.warning("checkpoint: %s could not be removed: %s", parent.path / hidden, error)
        finally:
            os.close(fd)
