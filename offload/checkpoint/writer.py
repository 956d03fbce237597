"""A checkpoint that is being written: whole in the end, or absent.

    with CheckpointWriter(path) as writer:
        shard = writer.open_shard("model", [TensorSpec("weight", "F32", (2, 2))])
        shard.write("weight", 0, tensor)
        writer.commit(values, fingerprint, keep=3)

All work is done in a hidden directory beside `path`. `commit` makes the files durable one by one,
the manifest after them, then the directory, and then publishes it by a rename, which is atomic for
all other processes. An error before that, or in it, removes everything. A failed fsync is final:
the system may have dropped the bytes, and a second fsync would not say so.

Several ranks save together (`rank_group`): the first makes the directory, every other rank writes
in it, by an `invitation`. All write their own bytes, which are durable before a rank says so; the
first alone writes the manifest and publishes the checkpoint, when all ranks have said so.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from offload.checkpoint.disk import CheckpointDisk, identity_of, told, write_whole
from offload.checkpoint.draft import SharedDraft, UnfinishedCheckpoint, check_path
from offload.checkpoint.format.manifest import MANIFEST, SHARD_NAME, Manifest
from offload.checkpoint.output import BUFFER_BYTES, Output, OutputFile
from offload.checkpoint.rank_group import Range, RankGroup, TensorToSave, divide, in_files
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.retention import OlderCheckpoints, next_number
from offload.checkpoint.shard import Shard, Shards
from offload.core.errors import ConfigError, CorruptionError, FormatError, OffloadError, StateError
from offload.core.metrics import Metrics
from offload.core.portable import close_fds, drop_cached
from offload.storage.safetensors_header import TensorPlace, TensorSpec, build_header

_MOST_SHARD_BYTES = 4 << 30
# The phases of a commit, which all ranks go through.
WRITTEN, DESCRIBED, VERIFIED, PUBLISHED = "written", "described", "verified", "published"

Draft: TypeAlias = UnfinishedCheckpoint | SharedDraft


class WriterState(Enum):
    OPEN = "open"  # shards are opened and written
    COMMITTING = "being committed"
    DONE = "saved"  # it has its final name
    GONE = "abandoned"  # nothing of it is left


class CheckpointWriter:
    """A writer of one checkpoint. Any thread may write shards; one thread commits or abandons."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        disk: CheckpointDisk | None = None,
        metrics: Metrics | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        rank_group: RankGroup | None = None,
        invitation: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the hidden directory, and missing parents. buffer_bytes: of all shards together.
        rank_group: the ranks that save together. invitation: on every rank but the first, what
        the first rank's writer says.
        """
        self.path = check_path(path) if invitation is None else Path.cwd() / path
        self._rank_group = rank_group or RankGroup(f"save of {path}", None)
        assert self._rank_group.is_first == (invitation is None)
        self._disk, self._metrics = disk or CheckpointDisk(), metrics or Metrics()
        self._lock = threading.RLock()
        self._state = WriterState.OPEN
        self._shards: list[Shard] = []
        self._names: set[str] = set()
        self._manifest: Manifest | None = None
        self._pid = os.getpid()
        self._output = Output(self._disk, self._metrics, buffer_bytes)
        try:
            self._draft = self._make_draft(invitation)
        except BaseException:
            self._output.close(StateError(f"checkpoint {self.path}: never begun"))
            raise
        self._discard = weakref.finalize(
            self, _discard, self._pid, self.path, self._output, self._draft
        )
        self._disk.hook("created" if self._rank_group.is_first else "joined")

    def _make_draft(self, invitation: Mapping[str, Any] | None) -> Draft:
        if invitation is not None:
            return SharedDraft(self.path, invitation, self._disk)
        is_shared = self._rank_group.count > 1
        return UnfinishedCheckpoint(self.path, self._disk, self._metrics, is_shared)

    @property
    def _own_draft(self) -> UnfinishedCheckpoint:
        """The directory, of which the first rank alone makes a checkpoint."""
        assert isinstance(self._draft, UnfinishedCheckpoint)
        return self._draft

    # --- shards -----------------------------------------------------------------------------------

    def open_section(self, section: str, holdings: Sequence[TensorToSave]) -> Shards:
        """Open as many files as it takes to keep each small enough to move about easily."""
        files = in_files(holdings, lambda each: each.spec.nbytes, _MOST_SHARD_BYTES)
        own = [{each.spec.name: each.own for each in some} for some in files]
        specs = [[each.spec for each in some] for some in files]
        return Shards(map(partial(self.open_shard, section), specs, own))

    def open_shard(
        self,
        section: str,
        tensors: Sequence[TensorSpec],
        own: Mapping[str, Sequence[Range] | None] | None = None,
    ) -> Shard:
        """Make a new file for these tensors of `section`, with room for all of their bytes, or open
        the first rank's. own: of each tensor, as in `TensorToSave`; for a save of several ranks.

        A full disk is reported here: a `StoreError` with the numbers. An error in making the file
        fails the whole save.
        """
        with self._lock:
            self._check_open()
            self._output.check()
            number = 1 + sum(shard.section == section for shard in self._shards)
            name = f"{section}-{number:05d}.safetensors"
            if not isinstance(section, str) or not SHARD_NAME.fullmatch(name):
                raise ConfigError(f"section: expected small letters and digits, got {section!r}")
            header, places = self._header(section, tensors)
            nbytes = len(header) + sum(place.nbytes for place in places.values())
            rank, count = self._rank_group.rank, self._rank_group.count
            mine = divide(places, own or dict.fromkeys(places), rank, count)
            try:
                file = self._open_file(name, nbytes)
                header = header if self._rank_group.is_first else b""
                shard = Shard(self._output, file, name, nbytes, header, places, mine)
            except BaseException as error:
                self._output.fail(error)
                raise
            self._shards.append(shard)
            self._names |= {f"{section}/{tensor.name}" for tensor in tensors}
        self._disk.hook("shard opened")
        return shard

    def _header(
        self, section: str, tensors: Sequence[TensorSpec]
    ) -> tuple[bytes, dict[str, TensorPlace]]:
        twice = [t.name for t in tensors if f"{section}/{t.name}" in self._names]
        if twice:
            raise ConfigError(f"{section}: {twice[0]!r} is in another shard of it already")
        try:
            return build_header(tensors)
        except FormatError as error:
            raise ConfigError(f"{section}: {error}") from error

    def _open_file(self, name: str, nbytes: int) -> OutputFile:
        file = self._draft.open_file(name, nbytes)
        if file.block_bytes > self._output.each_bytes:
            raise ConfigError(
                f"{file.label}: is written in blocks of {file.block_bytes} bytes, one buffer has "
                f"{self._output.each_bytes}; save on another file system"
            )
        return file

    def invitation(self) -> dict[str, Any]:
        """Return what the other ranks must know to write their parts. All shards must be open."""
        return {
            "directory": str(self._own_draft.folder),
            "identity": identity_of(self._own_draft.fd),
            "files": {
                shard.name: [shard.file.align, *identity_of(shard.file.fd)]
                for shard in self._shards
            },
        }

    # --- commit -----------------------------------------------------------------------------------

    def commit(
        self, values: Mapping[str, Any], fingerprint: str, *, keep: int | None = None
    ) -> Path:
        """Make the checkpoint durable and publish it; return its path.

        values: by section, as `format.values.encode` made them; the first rank's are saved, and so
        is its fingerprint. keep: how many checkpoints of this
        directory with this fingerprint stay, this one included; None: all. With a number, all of
        the checkpoint is first read back past the page cache and compared, and older ones beyond
        that number are removed at the end. On any error nothing of the checkpoint is left, and no
        older one has been removed. The exception: if another rank is lost after the checkpoint is
        published, it stays, and the error says so.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep: expected None, or 1 or more, got {keep!r}")
        with self._lock:
            self._check_open()
            self._state = WriterState.COMMITTING
        rank_group = self._rank_group
        try:
            pieces = rank_group.by_consensus(WRITTEN, self._flush)
            rank_group.by_consensus(DESCRIBED, lambda: self._describe(pieces, values, fingerprint))
            if keep is not None:
                rank_group.by_consensus(VERIFIED, self._verify)
            rank_group.by_consensus(PUBLISHED, lambda: self._publish(keep))
            if not rank_group.is_first:
                self._end()
        except BaseException as error:
            self.abandon()
            is_about_others = isinstance(error, OffloadError) and rank_group.count > 1
            if self._state is WriterState.DONE and is_about_others:
                raise StateError(f"checkpoint {self.path}: is saved, but then: {error}") from error
            raise
        return self.path

    def _flush(self) -> dict[str, Any]:
        """Wait until all writes of this rank have ended. On every rank but the first, make their
        bytes durable, and return the pieces that they consist of.
        """
        # Raises if bytes are missing, before we wait for anything.
        pieces = {shard.name: shard.pieces() for shard in self._shards}
        self._output.flush()
        self._disk.hook("data written")
        if self._rank_group.is_first:
            return {}
        self._sync_files()
        return pieces

    def _sync_files(self) -> None:
        for shard in self._shards:
            self._output.check()
            if self._rank_group.is_first:
                with told("truncate", shard.file.label):
                    self._disk.truncate(shard.file.fd, shard.nbytes)
            with told("fsync", shard.file.label):
                self._disk.fsync(shard.file.fd)
        self._disk.hook("files synced")

    def _describe(
        self, pieces: Sequence[Mapping[str, Any]], values: Mapping[str, Any], fingerprint: str
    ) -> None:
        """On the first rank, add the pieces that the other ranks have written, and make files,
        manifest and directory durable under the hidden name.
        """
        if not self._rank_group.is_first:
            return
        for theirs in pieces[1:]:
            for shard in self._shards:
                shard.take_in(theirs[shard.name])
        draft = self._own_draft
        saved = [tensor for shard in self._shards for tensor in shard.saved()]
        self._sync_files()
        self._manifest = manifest = Manifest(
            number=next_number(draft.parent),
            created_s=int(time.time()),
            fingerprint=fingerprint,
            files={shard.name: shard.nbytes for shard in self._shards},
            tensors={tensor.name: tensor for tensor in saved},
            values=values,
        )
        self._write_manifest(manifest.to_bytes())
        with told("fsync of directory", draft.folder):
            self._disk.fsync_dir(draft.fd)
        self._disk.hook("manifest synced")

    def _publish(self, keep: int | None) -> None:
        self._output.check()
        if self._rank_group.is_first:
            self._own_draft.publish()
            self._end(keep)

    def _write_manifest(self, text: bytes) -> None:
        path = self.path / MANIFEST
        fd = self._own_draft.open_new(MANIFEST)
        try:
            with told("write", path):
                write_whole(self._disk, fd, text, 0)
            self._disk.hook("manifest written")
            with told("fsync", path):
                self._disk.fsync(fd)
            drop_cached(fd, 0, 0)  # so that a later read comes from the disk
        finally:
            os.close(fd)

    def _verify(self) -> None:
        """Read everything, or this rank's share of it, back from the disk, and compare it."""
        output, hidden = self._output, self._draft.folder
        share_of = self._rank_group.rank, self._rank_group.count
        try:
            with CheckpointReader(hidden, metrics=self._metrics, engine=output.engine) as reader:
                if self._manifest is not None and reader.manifest != self._manifest:
                    raise FormatError(
                        f"{hidden / MANIFEST}: it is not the manifest that was written"
                    )
                reader.check(output.buffers, output.check, share_of)
        except FormatError as error:  # it was right when it was written
            raise CorruptionError(
                f"checkpoint {self.path}: what was read from the disk is not what was written "
                f"({error}); the drive, its cable or the memory is faulty: use another drive",
                errno=errno.EBADMSG,
                operation="verify",
                file=str(self.path),
            ) from error
        self._disk.hook("verified")

    def _end(self, keep: int | None = None) -> None:
        """Release everything after the checkpoint is published, and remove older checkpoints. The
        checkpoint stays saved, also if this fails.
        """
        self._state = WriterState.DONE
        try:
            _close_files(self.path, self._output, self._draft, "is saved; open another writer")
            self._metrics.count("checkpoint_written_bytes", self._output.written_bytes)
            if keep is not None:
                assert self._manifest is not None
                older = OlderCheckpoints(
                    self._own_draft.parent, self._manifest, self._disk, self._metrics
                )
                older.remove_all_but(keep - 1)
        finally:
            self._discard.detach()
            self._draft.release()

    # --- the end ----------------------------------------------------------------------------------

    @property
    def progress(self) -> object:
        """A value that changes whenever the save has made progress."""
        return self._output.progress, self._output.looks

    def cancel(self, error: BaseException) -> None:
        """Make the thread that writes or commits raise `error` soon, unless the checkpoint is saved
        by then. Any thread may call it.
        """
        self._output.fail(error)

    def abandon(self) -> None:
        """Remove everything, unless the checkpoint is saved. Idempotent; also called at the end of
        `with`, and when the writer is garbage-collected.
        """
        with self._lock:
            if self._state in (WriterState.DONE, WriterState.GONE):
                return
            self._state = WriterState.GONE
        if not self._rank_group.is_first:
            self._rank_group.leave()  # before discard looks whether the first still lives
        self._discard()

    def _check_open(self) -> None:
        if self._state is not WriterState.OPEN:
            raise StateError(f"checkpoint {self.path}: is {self._state.value}")
        if os.getpid() != self._pid:
            raise StateError(f"checkpoint {self.path}: begun by the parent process; save it there")

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


# The finalizer does not refer to the writer, so that an abandoned one can be garbage-collected.


def _discard(pid: int, path: Path, output: Output, draft: Draft) -> None:
    """Release everything, and remove it. Does nothing in a forked child."""
    if os.getpid() == pid:
        _close_files(path, output, draft, "abandoned")
        draft.discard()


def _close_files(path: Path, output: Output, draft: Draft, why: str) -> None:
    if output.close(StateError(f"checkpoint {path}: {why}")):
        close_fds(draft.fds)  # else the kernel may still use them
