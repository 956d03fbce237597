"""A safetensors file, read only: which tensors it has, of what type and shape, and where.

Eight bytes with the length of a header, the header in JSON, then the tensors' bytes one behind the
other. Files come from anywhere, so nothing in the header is believed: its length is bounded, names
are there once, every tensor has exactly the bytes that its type and shape ask for, and together
they are the file, without holes and overlaps. What does not fit is a `FormatError`.

An open file keeps its size and time of change; `check_unchanged` compares. Knows no models.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from offload.errors import FormatError, StoreError
from offload.machine_disk import read_dio_alignment

MOST_HEADER_BYTES = 100_000_000
_MOST_DIMS = 64  # as torch has it
_MOST_NUMBER = 2**63 - 1
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
    """A tensor in a file. offset: of its first byte there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class OpenedFile:
    """One way to read a file: past the page cache (align: of offsets and lengths), or not (1)."""

    fd: int
    align: int
    label: str


class SafetensorsFile:
    """One file, open until `close`. entries: its tensors by name, in the order of their bytes."""

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
            # Not to hang where it is a pipe.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        except OSError as error:
            raise self._refusal("open", error) from error
        self._fds.append(fd)
        return fd

    def _open_direct(self) -> OpenedFile | None:
        """The same file past the page cache, where a read there really works."""
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
        if self.nbytes < 8:
            self._refuse(f"a file of {self.nbytes} bytes is too short; is it cut off?")
        begin = bytearray(8)
        self.read_into(0, begin)
        (length,) = struct.unpack("<Q", begin)
        if length > MOST_HEADER_BYTES:
            self._refuse(f"its header claims {length} bytes; {MOST_HEADER_BYTES} at most are read")
        if length > self.nbytes - 8:
            self._refuse(
                f"its header claims {length} bytes, the file has {self.nbytes}; is it cut off?"
            )
        header = bytearray(length)
        self.read_into(8, header)
        try:
            return parse_header(bytes(header), self.nbytes - 8 - length, 8 + length)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from error.__cause__

    # --- use --------------------------------------------------------------------------------------

    def read_into(self, offset: int, memory: Any) -> None:
        """Fill `memory` with what is at `offset`, now and in this thread: for small things."""
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
        """Raise `StoreError` where the file is not the one that was opened any more."""
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
        """Idempotent. Nothing may be reading."""
        _close(self._fds)

    def _refusal(self, operation: str, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path}: cannot {operation} it: {os.strerror(error.errno or 0)}; see that it is "
            "there and may be read",
            errno=error.errno,
            operation=operation,
            file=self.label,
        )

    def _refuse(self, why: str) -> NoReturn:
        raise FormatError(f"{self.path}: not a safetensors file: {why}")


def _close(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


def parse_json(text: bytes) -> Any:
    """JSON in UTF-8 without repeated keys, NaN and the like. Raises `FormatError`."""
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected JSON in UTF-8, got {error}") from error


def parse_header(
    text: bytes, data_bytes: int, data_offset: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a header, for data of this length at this place of the file."""
    if not text.startswith(b"{"):
        raise FormatError("its header: expected JSON that begins with {")
    found = parse_json(text)
    metadata = found.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise FormatError(f"__metadata__: expected texts by name, got {_shown(metadata)}")
    entries = [_entry(name, value, data_offset) for name, value in found.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = data_offset
    for entry in entries:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole"
            raise FormatError(
                f"{_shown(entry.name)}: {what}: begins at {entry.offset - data_offset} of the "
                f"data, expected {end - data_offset}"
            )
        end += entry.nbytes
    if end - data_offset != data_bytes:
        raise FormatError(
            f"its tensors have {end - data_offset} bytes, the file has {data_bytes} for them; is "
            "it cut off?"
        )
    return {entry.name: entry for entry in entries}, metadata


def _entry(name: str, value: Any, data_offset: int) -> Entry:
    def refuse(why: str) -> NoReturn:
        raise FormatError(f"{_shown(name)}: {why}")

    if any("\ud800" <= letter <= "\udfff" for letter in name):
        refuse("expected a name in UTF-8")
    if type(value) is not dict or set(value) != {"dtype", "shape", "data_offsets"}:
        refuse(f"expected dtype, shape and data_offsets, got {_shown(value)}")
    dtype = DTYPES.get(value["dtype"]) if type(value["dtype"]) is str else None
    if dtype is None:
        refuse(f"expected a dtype of {', '.join(DTYPES)}, got {_shown(value['dtype'])}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MOST_DIMS:
        refuse(f"expected a shape of up to {_MOST_DIMS} sizes, got {_shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"expected data_offsets of begin and end, got {_shown(offsets)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != offsets[1] - offsets[0]:
        refuse(
            f"{value['dtype']} of shape {_shown(shape)} has {_shown(nbytes)} bytes, but its "
            f"data_offsets {offsets} have {offsets[1] - offsets[0]}"
        )
    return Entry(name, dtype, tuple(shape), data_offset + offsets[0], nbytes)


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(n) is int and 0 <= n <= _MOST_NUMBER for n in value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{_shown(twice)} twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _shown(value: object) -> str:
    """For a message: what a file says may be endless, and may do things to a terminal."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."
