"""A safetensors file, read only: its tensors with their dtypes, shapes and offsets.

Files are untrusted: `offload.storage.safetensors_header` checks all that the header says, and
raises `FormatError` where it is inconsistent. This module knows no models.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from offload.core.errors import FormatError, StoreError
from offload.core.portable import close_fds, refused
from offload.storage.direct_file import DirectFile
from offload.storage.safetensors_header import LENGTH_BYTES, parse_header, parse_length

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


class SafetensorsFile(DirectFile):
    """A file that is open until `close`. entries: its tensors by name, in the order of offsets."""

    def __init__(self, path: Path) -> None:
        self._fds: list[int] = []
        weakref.finalize(self, close_fds, self._fds).atexit = False
        try:
            # O_NONBLOCK: opening a pipe must not hang.
            self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            raise refused(path, "open", error) from error
        try:
            if not stat.S_ISREG(os.fstat(self._fds[0]).st_mode):
                raise FormatError(f"{path}: expected a safetensors file, got something else")
            super().__init__(path, self._fds, "put the old file back and prepare the model again")
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

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

    def read_into(self, offset: int, memory: Any) -> None:
        """Fill `memory` with the bytes at `offset`. Blocks the calling thread: for small reads."""
        view = memoryview(memory).cast("B")
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.buffered.fd, [view[done:]], offset + done)
            except OSError as error:
                raise refused(self.path, "read", error, offset=offset + done) from error
            if not got:
                raise StoreError(
                    f"{self.path}: ends at {offset + done}, expected {len(view) - done} bytes "
                    "more; it was cut short while it was read",
                    operation="read",
                    file=self.label,
                    offset_bytes=offset + done,
                )
            done += got

    def close(self) -> None:
        """Close the file. Idempotent. No read may be in flight."""
        close_fds(self._fds)
