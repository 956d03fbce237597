"""Verification of every byte of a checkpoint, in a few MiB of memory and without torch.

The manifest has its own digest. Of each file the verifier checks that it is there, regular and of
its size, that its header is, byte for byte, the one that the manifest's tensors require, and that
each part has its CRC-32; the parts are all the rest of the file, as parsing the manifest has shown.
Other files in the directory are reported, but are no damage: no reader ever opens them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from offload.checkpoint.format.directory import CheckpointDirectory, list_numbers, read_into
from offload.checkpoint.format.manifest import (
    MANIFEST,
    VERSION,
    Manifest,
    SavedTensor,
    claimed_version,
    crc32,
)
from offload.core.errors import ConfigError, FormatError, StoreError
from offload.core.format_limits import MOST_FINDINGS, READ_BYTES
from offload.core.portable import drop_cached
from offload.core.strict_json import printable, shown
from offload.storage.safetensors_header import (
    LENGTH_BYTES,
    SHARD_METADATA,
    TensorPlace,
    TensorSpec,
    build_header,
    parse_header,
    parse_length,
)

# Errors of the reading process, which say nothing about the checkpoint.
_TROUBLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})

Report = Callable[[int, int], None]


@dataclass
class Verdict:
    """The result of a verification.

    manifest: None if it is damaged itself. damage: the first findings, in words; damages: how many
    there are in all. foreign: the other files in the directory.
    """

    path: Path
    manifest: Manifest | None = None
    damage: list[str] = field(default_factory=list)
    damages: int = 0
    foreign: list[str] = field(default_factory=list)
    checked_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return self.damages == 0

    def add(self, error: FormatError | StoreError) -> None:
        """Record the error as damage; raise it if it is this process's own trouble."""
        if isinstance(error, StoreError) and error.errno in _TROUBLE:
            raise error
        self.damages += 1
        if len(self.damage) < MOST_FINDINGS:
            self.damage.append(str(error))


def verify(path: str | os.PathLike[str], report: Report = lambda done, total: None) -> Verdict:
    """Read a checkpoint and report what is wrong with it. report: called often, with the bytes done
    and those in all.

    Raises `ConfigError` if `path` is no checkpoint, or one of another version; `StoreError` if it
    may not be read.
    """
    try:
        directory = CheckpointDirectory(path)
    except StoreError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ConfigError(f"expected the directory of a checkpoint: {error}") from error
        raise
    with directory:
        names = directory.names()
        if MANIFEST not in names:
            _refuse(directory)
        findings = Verdict(directory.path)
        try:
            manifest = directory.read_manifest()
        except (FormatError, StoreError) as error:
            if isinstance(error, FormatError):
                _check_version(directory)
            findings.add(error)
            return findings
        findings.manifest = manifest
        findings.foreign = [n for n in names if n != MANIFEST and n not in manifest.files]
        _Verifier(directory, manifest, findings, report).check_files()
    return findings


def _refuse(directory: CheckpointDirectory) -> NoReturn:
    below = list(list_numbers(directory))
    more = f"; checkpoints below it: {shown(below[:10])}" if below else ""
    raise ConfigError(
        f"{printable(directory.path)}: is no checkpoint: it has no {MANIFEST}; give a directory "
        f"that a save has made{more}"
    )


def _check_version(directory: CheckpointDirectory) -> None:
    """Refuse a checkpoint of another version, which this code cannot read: it may be whole."""
    version = None
    with suppress(StoreError):
        version = claimed_version(directory.begin_of_manifest())
    if version is not None and version != VERSION:
        raise ConfigError(
            f"{printable(directory.path / MANIFEST)}: has version {version} of the format, "
            f"expected {VERSION}; check it with the version of offload that has written it"
        )


class _Verifier:
    """A pass over the files of one manifest, with one buffer."""

    def __init__(
        self, directory: CheckpointDirectory, manifest: Manifest, findings: Verdict, report: Report
    ) -> None:
        self._directory = directory
        self._files = manifest.files
        self._findings = findings
        self._report = report
        self._total_bytes = sum(manifest.files.values())
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._tensors = manifest.by_file()

    def check_files(self) -> None:
        done = 0
        for name, nbytes in self._files.items():
            self._report(done, self._total_bytes)
            try:
                with self._directory.opened(name) as fd:
                    self._check_file(fd, name, self._tensors[name], done)
            except (FormatError, StoreError) as error:
                self._findings.add(error)
            done += nbytes
        self._report(done, self._total_bytes)

    def _check_file(self, fd: int, name: str, tensors: list[SavedTensor], done: int) -> None:
        path = self._directory.path / name
        nbytes = os.fstat(fd).st_size
        if nbytes != self._files[name]:
            raise FormatError(
                f"{printable(path)}: has {nbytes} bytes, expected {self._files[name]}"
            )
        # The page cache may hold the right bytes where the disk does not.
        drop_cached(fd, 0, 0)
        data_offset = tensors[0].parts[0].offset if tensors else nbytes
        try:
            _check_header(fd, path, tensors, data_offset, nbytes)
            self._findings.checked_bytes += data_offset
        except FormatError as error:
            self._findings.add(error)
        for tensor in tensors:
            self._check_parts(fd, path, tensor, done)

    def _check_parts(self, fd: int, path: Path, tensor: SavedTensor, done: int) -> None:
        for part in tensor.parts:
            try:
                found = self._crc_of(fd, part.offset, part.nbytes, path)
            except StoreError as error:
                self._findings.add(error)
                continue
            finally:
                self._report(done + part.offset + part.nbytes, self._total_bytes)
            self._findings.checked_bytes += part.nbytes
            if found != part.crc32:
                what = f"{printable(path)}: {shown(tensor.name)}: the {part.nbytes} bytes"
                crcs = f"have the CRC-32 {found:08x}, expected {part.crc32:08x}"
                self._findings.add(FormatError(f"{what} at {part.offset} {crcs}"))

    def _crc_of(self, fd: int, offset: int, nbytes: int, path: Path) -> int:
        value, end = 0, offset + nbytes
        for at in range(offset, end, READ_BYTES):
            piece = self._buffer[: min(READ_BYTES, end - at)]
            read_into(fd, at, piece, path)
            value = crc32(piece, value)
        # Read once: these bytes need not evict what other programs keep in the page cache.
        drop_cached(fd, offset, nbytes)
        return value


def _check_header(
    fd: int, path: Path, tensors: list[SavedTensor], data_offset: int, file_bytes: int
) -> None:
    """Check that the header says of each tensor what the manifest says, and nothing else."""
    begin = bytearray(LENGTH_BYTES)
    read_into(fd, 0, begin, path)
    try:
        length = parse_length(begin, file_bytes)
        if LENGTH_BYTES + length != data_offset:
            raise FormatError(
                f"its header has {length} bytes, expected {data_offset - LENGTH_BYTES}"
            )
        text = bytearray(length)
        read_into(fd, LENGTH_BYTES, text, path)
        found, metadata = parse_header(bytes(text), file_bytes - data_offset, data_offset)
        _compare(found, tensors)
        specs = [TensorSpec(name, place.dtype, place.shape) for name, place in found.items()]
        if metadata != SHARD_METADATA or build_header(specs)[0] != bytes(begin + text):
            raise FormatError("its header is not written as it should be")
    except FormatError as error:
        raise FormatError(f"{printable(path)}: {error}") from error.__cause__


def _compare(found: dict[str, TensorPlace], tensors: list[SavedTensor]) -> None:
    expected = {
        tensor.key: TensorPlace(tensor.dtype, tensor.shape, tensor.parts[0].offset, tensor.nbytes)
        for tensor in tensors
    }
    if found == expected:
        return
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise FormatError(
                f"{shown(name)}: its header has {found.get(name)}, the manifest has "
                f"{expected.get(name)}"
            )
