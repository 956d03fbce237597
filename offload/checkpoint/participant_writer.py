"""A rank's part of a checkpoint that another rank, the first, has made and will publish.

The first rank says where: a directory that it holds, and files in it. Both are checked before
anything is written: this process must see the very same ones, which it does on the same node alone.
What this rank writes is durable before it reports so to the first rank.

If the first rank is lost, its lock on the directory is free, and what it had begun is removed by
the ranks that are left, or by the next save.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.checkpoint.disk import CheckpointDisk, told
from offload.checkpoint.division import Range
from offload.checkpoint.draft import remove_leftovers
from offload.checkpoint.format.directory import CheckpointDirectory
from offload.checkpoint.output import BUFFER_BYTES, Output, OutputFile
from offload.checkpoint.rank_group import RankGroup
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.shard import Shard, ShardHeader
from offload.checkpoint.staging_dir import is_ours, leads_to, name_within, remove, try_lock
from offload.checkpoint.writer import (
    DESCRIBED,
    MOVES,
    PUBLISHED,
    VERIFIED,
    WRITTEN,
    WriterState,
    identity_of,
    not_what_was_written,
    share,
)
from offload.core.errors import ConfigError, FormatError, OffloadError, StateError
from offload.core.locks import nap
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.storage.safetensors_header import TensorSpec

_GONE_S = 1.0  # until the locks of a killed process are free
_GONE_STEP_S = 0.02


class _SharedSaveDirectory:
    """The directory of the first rank, and this rank's descriptors of files in it. It does not
    refer to the writer, so that an abandoned writer can be garbage-collected.
    """

    def __init__(self, path: Path, invitation: Mapping[str, Any], disk: CheckpointDisk) -> None:
        self.path, self.disk = path, disk
        self.pid = os.getpid()
        self.fds: list[int] = []
        self.output: Output | None = None
        self.is_done = False
        self.directory = Path(str(invitation["directory"]))
        name = self.directory.name
        if self.directory.parent != path.parent or name_within(name) != path.name:
            raise StateError(f"save of {path}: the first rank saves in {self.directory}")
        self.parent = CheckpointDirectory(path.parent)
        try:
            with told("open", self.directory):
                self.fd = os.open(name, _OPEN_DIRECTORY, dir_fd=self.parent.fd)
            self.fds.append(self.fd)
            _check_same(self.directory, self.fd, invitation["identity"], stat.S_ISDIR)
        except BaseException:
            self.close()
            raise

    def open(self, name: str, identity: Sequence[int], nbytes: int) -> int:
        """Open a file that the first rank made, to read and write it; `close` closes them all."""
        path = self.directory / name
        with told("open", path):
            fd = self.disk.open_again(self.fd, name)
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
        """Close this rank's files; remove the directory if the first rank is lost. Idempotent. Does
        nothing in a forked child.
        """
        if os.getpid() != self.pid or not self.fds:
            return
        why = StateError(f"checkpoint {self.path}: abandoned")
        ended = self.output is None or self.output.close(why)
        try:
            if not self.is_done:
                self._remove_if_left_alone()
        except OSError as error:
            LOG.warning("checkpoint %s could not be removed: %s", self.directory, error)
        if ended:  # else the kernel may still use them
            self.close()

    def _remove_if_left_alone(self) -> None:
        """Remove the directory if the first rank is lost. While the first rank lives it holds the
        lock, and removes everything itself. Waits up to `_GONE_S` for the lock.
        """
        name, until_s = self.directory.name, time.monotonic() + _GONE_S
        while leads_to(self.parent.fd, name, self.fd):
            if try_lock(self.fd):
                files = [file for file in os.listdir(self.fd) if is_ours(file)]
                with suppress(FileNotFoundError):  # another rank was faster
                    remove(self.disk, self.parent.fd, name, self.fd, files)
                return
            if time.monotonic() > until_s:
                return
            nap(_GONE_STEP_S)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())
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


class ParticipantWriter:
    """A `CheckpointWriter` for every rank but the first."""

    def __init__(
        self,
        path: Path,
        invitation: Mapping[str, Any],
        rank_group: RankGroup,
        *,
        disk: CheckpointDisk | None = None,
        metrics: Metrics | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.path, self._rank_group = path, rank_group
        self._disk, self._metrics = disk or CheckpointDisk(), metrics or Metrics()
        self._files: Mapping[str, Sequence[int]] = invitation["files"]
        self._lock = threading.RLock()
        self._state = WriterState.OPEN
        self._shards: list[Shard] = []
        self._berth = _SharedSaveDirectory(path, invitation, self._disk)
        self._discard = weakref.finalize(self, self._berth.discard)
        self._output = self._berth.output = Output(self._disk, self._metrics, buffer_bytes)
        self._disk.hook("joined")

    def open_shard(
        self,
        section: str,
        tensors: Sequence[TensorSpec],
        own: Mapping[str, Sequence[Range] | None],
    ) -> Shard:
        """Open the file that the first rank has made for these tensors. own: see `TensorToSave`."""
        number = 1 + sum(shard.section == section for shard in self._shards)
        name = f"{section}-{number:05d}.safetensors"
        header = ShardHeader.of(section, tensors)
        if name not in self._files:
            raise StateError(f"save of {self.path}: the first rank has no file {name}")
        align, *identity = self._files[name]
        path = str(self._berth.directory / name)
        fd = self._berth.open(name, identity, header.nbytes)
        if align > 1:
            with told("open past the page cache", path):
                self._disk.join_direct(fd)
        file = OutputFile(fd, align, path, self._berth.open(name, identity, header.nbytes))
        bytes_of = share(header, own, self._rank_group)
        self._shards.append(Shard(self._output, file, name, header, bytes_of, is_first=False))
        return self._shards[-1]

    def commit(
        self, values: Mapping[str, Any], fingerprint: str, *, keep: int | None = None
    ) -> Path:
        """Make this rank's bytes durable, and return when the checkpoint is published. values,
        fingerprint: not used; the first rank's are saved. keep: unless None, this rank's share is
        read back and compared first.
        """
        with self._lock:
            self._move_to(WriterState.COMMITTING)
        rank_group = self._rank_group
        try:
            rank_group.by_consensus(WRITTEN, self._flush)
            rank_group.by_consensus(DESCRIBED, lambda: None)
            if keep is not None:
                rank_group.by_consensus(VERIFIED, self._verify)
            rank_group.by_consensus(PUBLISHED, self._output.check)
            self._move_to(WriterState.DONE)
        except BaseException:
            self.abandon()
            raise
        self._berth.is_done = True
        self._metrics.count("checkpoint_written_bytes", self._output.written_bytes)
        self._discard()
        return self.path

    def _flush(self) -> dict[str, Any]:
        """Make this rank's bytes durable; return the pieces that they consist of."""
        pieces = {shard.name: shard.pieces() for shard in self._shards}
        self._output.flush()
        self._disk.hook("data written")
        for shard in self._shards:
            self._output.check()
            with told("fsync", shard.file.label):
                self._disk.fsync(shard.file.fd)
        self._disk.hook("files synced")
        return pieces

    def _verify(self) -> None:
        """Read this rank's share back from the disk, and compare it."""
        output, share_of = self._output, (self._rank_group.rank, self._rank_group.count)
        hidden = self._berth.directory
        try:
            with CheckpointReader(hidden, metrics=self._metrics, engine=output.engine) as reader:
                reader.check(output.buffers, output.check, share_of)
        except FormatError as error:
            raise not_what_was_written(self.path, error) from error
        self._disk.hook("verified")

    @property
    def progress(self) -> object:
        return self._output.progress, self._output.looks

    def cancel(self, error: BaseException) -> None:
        """Make the thread that writes or commits raise `error` soon, unless the checkpoint is saved
        by then. Any thread may call it.
        """
        self._output.fail(error)

    def abandon(self) -> None:
        """Give up this rank's part, unless the checkpoint is saved. Idempotent."""
        with self._lock:
            if self._state in (WriterState.DONE, WriterState.GONE):
                return
            self._move_to(WriterState.GONE)
        self._rank_group.leave()  # before discard looks whether the first rank still lives
        self._discard()

    def _move_to(self, state: WriterState) -> None:
        if state not in MOVES[self._state]:
            raise StateError(
                f"checkpoint {self.path}: {self._state.name} -> {state.name} is not a legal move"
            )
        self._state = state


_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
