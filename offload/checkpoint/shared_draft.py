"""A checkpoint's directory that another rank, the first, has made and will publish.

The first rank says where: a directory that it holds, and files in it. Both are checked before
anything is written: this process must see the very same ones, which it does on the same node alone.

If the first rank is lost, its lock on the directory is free, and what it had begun is removed by
the ranks that are left, or by the next save.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.checkpoint.disk import CheckpointDisk, told
from offload.checkpoint.draft import remove_leftovers
from offload.checkpoint.format.directory import CheckpointDirectory
from offload.checkpoint.output import OutputFile
from offload.checkpoint.staging_dir import (
    identity_of,
    leads_to,
    name_within,
    open_directory,
    remove,
    try_lock,
)
from offload.core.errors import ConfigError, OffloadError, StateError
from offload.core.locks import nap
from offload.core.log import LOG

_GONE_S = 1.0  # until the locks of a killed process are free
_GONE_STEP_S = 0.02


class SharedDraft:
    """The directory of the first rank, as an `UnfinishedCheckpoint` that only takes files. folder:
    its path; fds: this rank's descriptors of files in it.
    """

    def __init__(self, path: Path, invitation: Mapping[str, Any], disk: CheckpointDisk) -> None:
        self.path, self._disk = path, disk
        self._files: Mapping[str, Sequence[int]] = invitation["files"]
        self.fd = -1
        self.fds: list[int] = []
        self.folder = Path(str(invitation["directory"]))
        name = self.folder.name
        if self.folder.parent != path.parent or name_within(name) != path.name:
            raise StateError(f"save of {path}: the first rank saves in {self.folder}")
        self.parent = CheckpointDirectory(path.parent)
        try:
            with told("open", self.folder):
                self.fd = open_directory(self.parent.fd, name)
            _check_same(self.folder, self.fd, invitation["identity"], stat.S_ISDIR)
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
            fd = self._disk.open_again(self.fd, path.name)
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
        """Close the directory; remove it if the first rank is lost. Idempotent."""
        try:
            if self.fd >= 0:
                self._remove_if_left_alone()
        except OSError as error:
            LOG.warning("checkpoint %s could not be removed: %s", self.folder, error)
        finally:
            self.release()

    def _remove_if_left_alone(self) -> None:
        """Remove the directory if the first rank is lost. While the first rank lives it holds the
        lock, and removes everything itself. Waits up to `_GONE_S` for the lock.
        """
        name, until_s = self.folder.name, time.monotonic() + _GONE_S
        while leads_to(self.parent.fd, name, self.fd):
            if try_lock(self.fd):
                with suppress(FileNotFoundError):  # another rank was faster
                    remove(self._disk, self.parent.fd, name, self.fd)
                return
            if time.monotonic() > until_s:
                return
            nap(_GONE_STEP_S)

    def release(self) -> None:
        """Close the directory. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.parent.close()


def sweep(path: Path, disk: CheckpointDisk | None = None) -> None:
    """Remove what a lost first rank has begun for `path` before it invited any other rank."""
    until_s = time.monotonic() + _GONE_S
    while time.monotonic() < until_s:
        with suppress(OffloadError, OSError), CheckpointDirectory(path.parent) as parent:
            with suppress(ConfigError):  # the first rank lives, and removes it itself
                remove_leftovers(parent, disk or CheckpointDisk(), path.name)
            if not any(name_within(name) == path.name for name in parent.names()):
                return
        nap(_GONE_STEP_S)


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
