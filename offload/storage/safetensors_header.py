"""Headers of safetensors files, read and written: tensors with their dtypes, shapes and offsets.

A file is eight bytes with the length of a header, the header in JSON, then the tensors' bytes one
after the other. Headers are untrusted: each name must be unique, each tensor must have exactly the
bytes that its dtype and shape require, and together they must fill the file without holes and
overlaps. Anything else is a `FormatError`. Headers written here are padded with spaces, so that
the tensors' bytes begin at a block of the disk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

from offload.core.errors import FormatError
from offload.core.format_limits import MOST_DIMS, MOST_HEADER_BYTES, MOST_NUMBER
from offload.core.strict_json import parse_json, shown

LENGTH_BYTES: Final = 8
METADATA: Final = "__metadata__"
# The metadata of every shard of a checkpoint. Hugging Face's readers require it.
SHARD_METADATA: Final[Mapping[str, str]] = MappingProxyType({"format": "pt"})
_BY_SIZE: Final = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64", "C64"),
}
# Bytes of an element, by the name of its type.
SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {name: nbytes for nbytes, names in _BY_SIZE.items() for name in names}
)


class TensorSpec(NamedTuple):
    """A tensor to be written. dtype: one of `SIZES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


class TensorPlace(NamedTuple):
    """A tensor in a file. offset: of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


# --- writing --------------------------------------------------------------------------------------


def build_header(
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, str] = SHARD_METADATA,
    align: int = 4096,
) -> tuple[bytes, dict[str, TensorPlace]]:
    """Build all bytes before the tensors' data, a multiple of `align` long, and their places.

    Tensors lie in the file in the given order. Other readers want each to begin at a multiple of
    its element size; wide dtypes first keeps it so. The same tensors always yield the same header:
    `verify` builds it again and compares every byte.
    """
    found: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    places: dict[str, TensorPlace] = {}
    end = 0
    for spec in tensors:
        if spec.name in found or spec.name == METADATA:
            raise FormatError(f"{shown(spec.name)}: expected a name that no other tensor has")
        check_tensor(*spec)
        nbytes = spec.nbytes
        found[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + nbytes],
        }
        places[spec.name] = TensorPlace(spec.dtype, spec.shape, end, nbytes)
        end += nbytes
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    data_offset = -(-(LENGTH_BYTES + len(text)) // align) * align
    length = data_offset - LENGTH_BYTES
    if length > MOST_HEADER_BYTES or data_offset + end > MOST_NUMBER:
        raise FormatError(
            f"{len(places)} tensors of {end} bytes need a header of {length} bytes; at most "
            f"{MOST_HEADER_BYTES}, and a file of {MOST_NUMBER}, can be read; use more files"
        )
    header = struct.pack("<Q", length) + text.ljust(length)
    moved = {
        name: place._replace(offset=data_offset + place.offset) for name, place in places.items()
    }
    return header, moved


# --- reading --------------------------------------------------------------------------------------


def parse_length(begin: bytes | bytearray, file_bytes: int) -> int:
    """Return the header's length from a file's first bytes, checked to lie within the file."""
    if len(begin) < LENGTH_BYTES:
        raise FormatError(
            f"not a safetensors file: a file of {file_bytes} bytes is too short; is it cut off?"
        )
    (length,) = struct.unpack_from("<Q", begin)
    assert isinstance(length, int)
    if length > MOST_HEADER_BYTES:
        raise FormatError(
            f"not a safetensors file: its header claims {length} bytes; {MOST_HEADER_BYTES} at "
            "most are read"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise FormatError(
            f"not a safetensors file: its header claims {length} bytes, the file has "
            f"{file_bytes}; is it cut off?"
        )
    return length


def parse_header(
    text: bytes, data_bytes: int, data_offset: int
) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return the tensors of a header, in the order of their offsets, and its metadata.

    data_bytes, data_offset: the length and the place of the tensors' bytes in the file.
    """
    if not text.startswith(b"{"):
        raise FormatError("its header: expected JSON that begins with {")
    found = parse_json(text)
    metadata = found.pop(METADATA, {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise FormatError(f"{METADATA}: expected texts by name, got {shown(metadata)}")
    places = [(name, _place(name, value, data_offset)) for name, value in found.items()]
    places.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    end = data_offset
    for name, place in places:
        if place.offset != end:
            what = "overlaps the tensor before it" if place.offset < end else "leaves a hole"
            raise FormatError(
                f"{shown(name)}: {what}: begins at {place.offset - data_offset} of the data, "
                f"expected {end - data_offset}"
            )
        end += place.nbytes
    if end - data_offset != data_bytes:
        raise FormatError(
            f"its tensors have {end - data_offset} bytes, the file has {data_bytes} for them; is "
            "it cut off?"
        )
    return dict(places), metadata


def _place(name: str, value: Any, data_offset: int) -> TensorPlace:
    def refuse(why: str) -> NoReturn:
        raise FormatError(f"{shown(name)}: {why}")

    if type(value) is not dict or set(value) != {"dtype", "shape", "data_offsets"}:
        refuse(f"expected dtype, shape and data_offsets, got {shown(value)}")
    shape, offsets = value["shape"], value["data_offsets"]
    check_tensor(name, value["dtype"], shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"expected data_offsets of begin and end, got {shown(offsets)}")
    nbytes = math.prod(shape) * SIZES[value["dtype"]]
    if nbytes != offsets[1] - offsets[0]:
        refuse(
            f"{value['dtype']} of shape {shown(shape)} has {shown(nbytes)} bytes, but its "
            f"data_offsets {offsets} have {offsets[1] - offsets[0]}"
        )
    return TensorPlace(value["dtype"], tuple(shape), data_offset + offsets[0], nbytes)


def check_tensor(name: str, dtype: Any, shape: Any) -> None:
    """Raise `FormatError` unless these are a valid name, dtype and shape."""
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise FormatError(f"{shown(name)}: expected a name in UTF-8")
    if type(dtype) is not str or dtype not in SIZES:
        raise FormatError(
            f"{shown(name)}: expected a dtype of {', '.join(SIZES)}, got {shown(dtype)}"
        )
    if not _are_sizes(shape) or len(shape) > MOST_DIMS:
        raise FormatError(
            f"{shown(name)}: expected a shape of up to {MOST_DIMS} sizes, got {shown(shape)}"
        )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        type(n) is int and 0 <= n <= MOST_NUMBER for n in value
    )
