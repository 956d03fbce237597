"""A safetensors file, read only: its tensors with their dtypes, shapes and offsets.

Files are untrusted: `offload.storage.safetensors_header` checks all that the header says, and
raises `FormatError` where it is inconsistent.

Size and modification time are recorded when a file is opened; `check_unchanged` compares them. This
module knows no models.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from offload.core.drive_facts import read_dio_alignment
from offload.core.errors import FormatError, StoreError
from offload.core.format_limits import MOST_HEADER_BYTES
from offload.storage.safetensors_header import LENGTH_BYTES, parse_header, parse_json, parse_length

__all__ = ["DTYPES", "MOST_HEADER_BYTES", "Entry", "OpenedFile", "SafetensorsFile", "parse_json"]

_BLOCK_BYTES = 4096
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "U16": torch.uint16,
        "I16": torch.int16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "F32": torch.float32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. offset: of its first byte in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class OpenedFile:
    """A descriptor of a file, for direct I/O (align: of offsets and lengths) or buffered (1)."""

    fd: int
    align: int
    label: str


class SafetensorsFile:
    """A file that is open until `close`. entries: its tensors by name, in the order of offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)
        self._fds: list[int] = []
        weakref.finalize(self, _close, self._fds).atexit = False
        fd = self._open(path)
        self.buffered = OpenedFile(fd, 1, self.label)
        try:
            self._seen = os.fstat(fd)
            if not stat.S_ISREG(self._seen.st_mode):
                raise FormatError(f"{path}: expected a safetensors file, got something else")
            self.nbytes = self._seen.st_size
            self.entries, self.metadata = self._read_header()
            self.direct = self._open_direct()
        except BaseException:
            self.close()
            raise

    # --- opening ----------------------------------------------------------------------------------

    def _open(self, path: Path, flags: int = 0) -> int:
        try:
            # O_NONBLOCK: opening a pipe must not hang.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        except OSError as error:
            raise self._refusal("open", error) from error
        self._fds.append(fd)
        return fd

    def _open_direct(self) -> OpenedFile | None:
        """Open the same file for direct I/O; return None unless a test read succeeds."""
        if not hasattr(os, "O_DIRECT") or self.nbytes < _BLOCK_BYTES:
            return None
        try:
            fd = self._open(Path(f"/proc/self/fd/{self.buffered.fd}"), os.O_DIRECT)
        except StoreError:
            return None
        declared = read_dio_alignment(fd) or (_BLOCK_BYTES, _BLOCK_BYTES)
        align = max(_BLOCK_BYTES, *declared)
        works = 0 not in declared and os.path.samestat(os.fstat(fd), self._seen)
        with mmap.mmap(-1, align) as area:
            try:
                works = works and os.preadv(fd, [area], 0) == min(align, self.nbytes)
            except OSError:
                works = False
        return OpenedFile(fd, align, self.label) if works else None

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        begin = bytearray(min(self.nbytes, LENGTH_BYTES))
        self.read_into(0, begin)
        try:
            length = parse_length(begin, self.nbytes)
            header = bytearray(length)
            self.read_into(LENGTH_BYTES, header)
            data_offset = LENGTH_BYTES + length
            places, metadata = parse_header(bytes(header), self.nbytes - data_offset, data_offset)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from error.__cause__
        return {
            name: Entry(name, DTYPES[place.dtype], place.shape, place.offset, place.nbytes)
            for name, place in places.items()
        }, metadata

    # --- use --------------------------------------------------------------------------------------

    def read_into(self, offset: int, memory: Any) -> None:
        """Fill `memory` with the bytes at `offset`. Blocks the calling thread: for small reads."""
        view = memoryview(memory).cast("B")
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.buffered.fd, [view[done:]], offset + done)
            except OSError as error:
                raise self._refusal("read", error) from error
            if not got:
                raise StoreError(
                    f"{self.path}: ends at {offset + done}, expected {len(view) - done} bytes "
                    "more; it was cut short while it was read",
                    operation="read",
                    file=self.label,
                    offset_bytes=offset + done,
                )
            done += got

    def check_unchanged(self, tensor: str | None = None) -> None:
        """Raise `StoreError` if the file's size or modification time differs from that at opening.

        tensor: the name that the message gives.
        """
        now, then = os.fstat(self.buffered.fd), self._seen
        if (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns):
            return
        what = f"{tensor}: " if tensor else ""
        raise StoreError(
            f"{what}{self.path} has changed while it was in use: it had {then.st_size} bytes, "
            f"written {then.st_mtime_ns} ns after 1970, and has {now.st_size}, written "
            f"{now.st_mtime_ns}; put the old file back and prepare the model again",
            operation="read",
            file=self.label,
            tensor=tensor,
        )

    def close(self) -> None:
        """Close the file. Idempotent. No read may be in flight."""
        _close(self._fds)

    def _refusal(self, operation: str, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path}: cannot {operation} it: {os.strerror(error.errno or 0)}; see that it is "
            "there and may be read",
            errno=error.errno,
            operation=operation,
            file=self.label,
        )


def _close(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
