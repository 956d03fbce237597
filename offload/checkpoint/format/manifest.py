"""The manifest of a checkpoint: which files, which tensors and where, and all other values.

One JSON document in ASCII whose last key is `sha256`, the digest of all bytes before the comma in
front of it. A parsed manifest is consistent in itself: files and tensors are there once, parts
tile each tensor, tensors tile the end of each file, values refer to tensors that are there. That
the files agree with it is for `verify` and the readers to check.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Final

from offload.checkpoint.format.values import decode
from offload.core.errors import ConfigError, CorruptionError, FormatError
from offload.core.format_limits import (
    MOST_CHECKPOINT_NUMBER,
    MOST_FILES,
    MOST_FINGERPRINT_CHARS,
    MOST_MANIFEST_BYTES,
    MOST_NAME_CHARS,
    MOST_NUMBER,
    MOST_PART_BYTES,
    MOST_PARTS,
    MOST_TENSORS,
)
from offload.core.strict_json import parse_json, shown
from offload.storage.safetensors_header import SIZES, TensorSpec, check_tensor

FORMAT: Final = "offload checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
# The section is part of the name: `model-00001.safetensors`.
SHARD_NAME: Final = re.compile(r"([a-z][a-z0-9_]{0,63})-([0-9]{5,9})\.safetensors", re.ASCII)
_KEYS: Final = (
    "format",
    "version",
    "number",
    "created_s",
    "fingerprint",
    "files",
    "tensors",
    "values",
)
# The beginning of every manifest: its number can be read without parsing all of it.
_BEGIN: Final = re.compile(rb'\{"format":"offload checkpoint","version":([0-9]{1,9}),')
_NUMBER: Final = re.compile(rb'"number":([0-9]{1,20}),')
_END: Final = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n')
_END_BYTES: Final = len(',"sha256":""}\n') + 64
_FINGERPRINT: Final = re.compile(rf"[0-9a-f]{{1,{MOST_FINGERPRINT_CHARS}}}")


@dataclass(frozen=True)
class CheckedPart:
    """A run of a tensor's bytes that is written, and checked, as one."""

    file: str
    offset: int  # in the file
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint. name: `section/name-in-shard`. dtype: as safetensors calls it.

    parts: in the order of the tensor's bytes; an empty tensor has one part of no bytes, which says
    where the tensor belongs.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[CheckedPart, ...]

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.key, self.dtype, self.shape)

    @property
    def section(self) -> str:
        return self.name.partition("/")[0]

    @property
    def key(self) -> str:
        """The tensor's name in the shard."""
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, as its manifest lists them.

    number: one more than that of the newest checkpoint beside it when it was saved. fingerprint:
    the same for all checkpoints of a model. files: the bytes of each. values: by section, encoded
    by `values.encode`.
    """

    number: int
    created_s: int
    fingerprint: str
    files: Mapping[str, int]
    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Any]

    def of_section(self, section: str) -> list[SavedTensor]:
        return [tensor for tensor in self.tensors.values() if tensor.section == section]

    def by_file(self) -> dict[str, list[SavedTensor]]:
        """Return the tensors of each file, in the order of their bytes."""
        found: dict[str, list[SavedTensor]] = {name: [] for name in self.files}
        for tensor in self.tensors.values():
            found[tensor.parts[0].file].append(tensor)
        for tensors in found.values():
            tensors.sort(key=lambda tensor: (tensor.parts[0].offset, tensor.nbytes))
        return found

    def to_bytes(self) -> bytes:
        """Return the bytes of the manifest file. Raises `FormatError` for what `parse` refuses."""
        _check(self)
        index = {name: i for i, name in enumerate(self.files)}
        document = {
            "format": FORMAT,
            "version": VERSION,
            "number": self.number,
            "created_s": self.created_s,
            "fingerprint": self.fingerprint,
            "files": [{"name": name, "nbytes": nbytes} for name, nbytes in self.files.items()],
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "parts": [[index[p.file], p.offset, p.nbytes, p.crc32] for p in tensor.parts],
                }
                for tensor in self.tensors.values()
            ],
            "values": dict(self.values),
        }
        try:
            text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
        except (TypeError, ValueError) as error:
            raise FormatError(f"values: expected those that values.encode made: {error}") from error
        body = text[:-1]
        end = b',"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode()
        if len(body) + len(end) > MOST_MANIFEST_BYTES:
            raise FormatError(
                f"a manifest of {len(body) + len(end)} bytes cannot be read again, only one of "
                f"{MOST_MANIFEST_BYTES}; keep less in values, or save large ones as tensors"
            )
        return body + end

    @classmethod
    def parse(cls, text: bytes | bytearray) -> Manifest:
        """Parse and check a manifest. Raises `FormatError`, or `CorruptionError` if the bytes are
        not those that were written.
        """
        _check_digest(text)
        found = parse_json(text)  # with the digest, because to cut it off would copy the rest
        if tuple(found) != (*_KEYS, "sha256"):
            raise FormatError(f"expected the keys {', '.join(_KEYS)}, got {shown(list(found))}")
        files = _parse_files(found["files"])
        manifest = cls(
            number=found["number"],
            created_s=found["created_s"],
            fingerprint=found["fingerprint"],
            files=files,
            tensors=_parse_tensors(found["tensors"], list(files)),
            values=found["values"],
        )
        _check(manifest)
        return manifest


def claimed_version(begin: bytes) -> int | None:
    """Return the version of a manifest that begins with these bytes; None: none can begin so."""
    head = _BEGIN.match(begin)
    return int(head[1]) if head else None


def claimed_number(begin: bytes | bytearray) -> int | None:
    """Return the number of a manifest that begins with these bytes; None: none can begin so."""
    head = _BEGIN.match(begin)
    number = _NUMBER.match(begin, head.end()) if head else None
    return int(number[1]) if number and int(number[1]) <= MOST_CHECKPOINT_NUMBER else None


# --- parsing --------------------------------------------------------------------------------------


def _check_digest(text: bytes | bytearray) -> None:
    """Check that the text begins and ends as a manifest, and its digest and format version."""
    if len(text) > MOST_MANIFEST_BYTES:
        raise FormatError(f"expected at most {MOST_MANIFEST_BYTES} bytes, got more")
    end = _END.fullmatch(text[-_END_BYTES:])
    head = _BEGIN.match(text)
    if head is None or end is None or not text.isascii():
        raise FormatError(
            f'expected JSON in ASCII that begins with the format "{FORMAT}" and a version, and '
            "ends with its sha256; is it cut off?"
        )
    digest = hashlib.sha256(memoryview(text)[:-_END_BYTES]).hexdigest()
    if digest != end[1].decode():
        raise CorruptionError(
            f"its bytes have the sha256 {digest}, expected {end[1].decode()}; it is not what was "
            "written: take another checkpoint",
            operation="verify",
        )
    if int(head[1]) != VERSION:
        raise FormatError(
            f"has version {int(head[1])} of the format, expected {VERSION}; it was written by "
            "another version of offload: use that one"
        )
    if claimed_number(text) is None:
        raise FormatError("expected its number behind its version")


def _parse_files(found: Any) -> dict[str, int]:
    _check_list("files", found, MOST_FILES)
    files: dict[str, int] = {}
    for file in found:
        if type(file) is not dict or tuple(file) != ("name", "nbytes"):
            raise FormatError(f"files: expected name and nbytes, got {shown(file)}")
        if type(file["name"]) is not str:
            raise FormatError(f"files: expected a name, got {shown(file['name'])}")
        if file["name"] in files:
            raise FormatError("files: a name is there twice")
        files[file["name"]] = file["nbytes"]
    return files


def _parse_tensors(found: Any, files: list[str]) -> dict[str, SavedTensor]:
    _check_list("tensors", found, MOST_TENSORS)
    tensors: dict[str, SavedTensor] = {}
    for entry in found:
        if type(entry) is not dict or tuple(entry) != ("name", "dtype", "shape", "parts"):
            raise FormatError(f"tensors: expected name, dtype, shape, parts, got {shown(entry)}")
        name = entry["name"]
        if type(name) is not str:
            raise FormatError(f"tensors: expected a name, got {shown(name)}")
        if name in tensors:
            raise FormatError(f"tensors: {shown(name)} twice")
        check_tensor(name, entry["dtype"], entry["shape"])
        _check_list(shown(name), entry["parts"], MOST_PARTS)
        parts = tuple(_parse_part(name, part, files) for part in entry["parts"])
        tensors[name] = SavedTensor(name, entry["dtype"], tuple(entry["shape"]), parts)
    return tensors


def _parse_part(name: str, part: Any, files: list[str]) -> CheckedPart:
    if type(part) is not list or len(part) != 4 or any(type(n) is not int for n in part):
        raise FormatError(
            f"{shown(name)}: expected a part of file, offset, nbytes and crc32, got {shown(part)}"
        )
    file, offset, nbytes, crc32 = part
    if not 0 <= file < len(files):
        raise FormatError(f"{shown(name)}: expected one of {len(files)} files, got {shown(file)}")
    return CheckedPart(files[file], offset, nbytes, crc32)


def _check_list(what: str, found: Any, most: int) -> None:
    if type(found) is not list or len(found) > most:
        raise FormatError(f"{what}: expected a list of at most {most}, got {shown(found)}")


# --- what holds in every manifest -----------------------------------------------------------------


def _check(manifest: Manifest) -> None:
    _check_whole("number", manifest.number, 1, MOST_CHECKPOINT_NUMBER)
    _check_whole("created_s", manifest.created_s, 0, MOST_NUMBER)
    fingerprint = manifest.fingerprint
    if type(fingerprint) is not str or not _FINGERPRINT.fullmatch(fingerprint):
        raise FormatError(f"fingerprint: expected hex digits, got {shown(fingerprint)}")
    if len(manifest.files) > MOST_FILES or len(manifest.tensors) > MOST_TENSORS:
        raise FormatError(f"expected at most {MOST_FILES} files and {MOST_TENSORS} tensors")
    for name, nbytes in manifest.files.items():
        if not SHARD_NAME.fullmatch(name):
            raise FormatError(
                f"files: expected names such as model-00001.safetensors, got {shown(name)}"
            )
        _check_whole(name, nbytes, 8, MOST_NUMBER)
    parts = 0
    for name, tensor in manifest.tensors.items():
        if name != tensor.name:
            raise FormatError(f"{shown(name)}: expected its own name, got {shown(tensor.name)}")
        _check_tensor(tensor, manifest.files)
        parts += len(tensor.parts)
    if parts > MOST_PARTS:
        raise FormatError(f"tensors: expected at most {MOST_PARTS} parts, got {parts}")
    _check_tiles(manifest)
    _check_values(manifest)


def _check_tensor(tensor: SavedTensor, files: Mapping[str, int]) -> None:
    """Check that a tensor's parts are its bytes, end to end, in one file of its section."""
    label = shown(tensor.name)
    check_tensor(tensor.name, tensor.dtype, tensor.shape)
    if len(tensor.name) > MOST_NAME_CHARS or "/" not in tensor.name:
        raise FormatError(
            f"{label}: expected a section, / and a name, in {MOST_NAME_CHARS} letters at most"
        )
    if not tensor.parts:
        raise FormatError(f"{label}: has no parts; one without bytes says where an empty one is")
    file = tensor.parts[0].file
    shard = SHARD_NAME.fullmatch(file)
    if file not in files or shard is None or shard[1] != tensor.section:
        raise FormatError(f"{label}: expected a file of its section, got {shown(file)}")
    end = tensor.parts[0].offset
    for part in tensor.parts:
        _check_whole(f"{label}: offset", part.offset, 8, files[file])
        least = 1 if tensor.nbytes else 0
        _check_whole(f"{label}: nbytes of a part", part.nbytes, least, MOST_PART_BYTES)
        _check_whole(f"{label}: crc32", part.crc32, 0, (1 << 32) - 1)
        if part.file != file or part.offset != end:
            raise FormatError(
                f"{label}: expected its next part at {end} of {shown(file)}, got {part.offset} of "
                f"{shown(part.file)}"
            )
        end += part.nbytes
    nbytes = end - tensor.parts[0].offset
    if nbytes != tensor.nbytes or (nbytes == 0 and len(tensor.parts) > 1):
        raise FormatError(
            f"{label}: {tensor.dtype} of shape {shown(tensor.shape)} has {shown(tensor.nbytes)} "
            f"bytes, its {len(tensor.parts)} parts have {nbytes}"
        )


def _check_tiles(manifest: Manifest) -> None:
    """Check that a file's tensors lie end to end and reach its end, so that none overlaps."""
    for file, tensors in manifest.by_file().items():
        end = tensors[0].parts[0].offset if tensors else manifest.files[file]
        for tensor in tensors:
            offset = tensor.parts[0].offset
            if offset != end:
                raise FormatError(
                    f"{shown(tensor.name)}: begins at {offset} of {file}, expected {end}, where "
                    "the tensor before it ends"
                )
            end += tensor.nbytes
        if end != manifest.files[file]:
            raise FormatError(
                f"{file}: has {manifest.files[file]} bytes, but its tensors end at {end}"
            )


def _check_values(manifest: Manifest) -> None:
    if not isinstance(manifest.values, Mapping):
        raise FormatError(f"values: expected an object, got {shown(manifest.values)}")

    def get(name: str) -> None:
        if name not in manifest.tensors:
            raise FormatError(
                f"values: expected the name of a tensor that is there, got {shown(name)}"
            )

    for section, tree in manifest.values.items():
        if type(section) is not str or len(section) > MOST_NAME_CHARS:
            raise FormatError(f"values: expected the name of a section, got {shown(section)}")
        decode(tree, get)


def _check_whole(what: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise FormatError(
            f"{what}: expected a whole number from {least} to {most}, got {shown(value)}"
        )


# --- the checksum of a part -----------------------------------------------------------------------


def crc32(data: Any, begin: int = 0) -> int:
    """Return the CRC-32 of contiguous bytes, as `zlib.crc32` does; the GIL is released. The native
    core computes it where it is built, at the speed of memory; otherwise zlib does.

    begin: the CRC-32 of the bytes before them.
    """
    native, isa = _choose()
    if native is None:
        return zlib.crc32(data, begin)
    return int(native.crc32(data, begin & 0xFFFF_FFFF, isa))


@cache
def _choose() -> tuple[ModuleType | None, str]:
    """Return the native core, or None for zlib, and the instruction set that the environment asks
    for ("" for none); `reference` is zlib.
    """
    asked = os.environ.get("OFFLOAD_ISA", "")
    # Not through offload.kernels, which needs torch.
    try:
        from offload import _native
    except ImportError:
        native, known = None, ["reference"]
    else:
        if not hasattr(_native, "crc32"):
            raise ConfigError(
                f"the native core {_native.__file__} was built by another version of offload: it "
                "has no crc32; build it again: pip install --force-reinstall offload, or make setup"
            )
        native, known = _native, [*_native.isas(), "reference"]
    if asked and asked not in known:
        raise ConfigError(
            f"OFFLOAD_ISA: instruction set {asked!r} is not available here, only {', '.join(known)}"
        )
    return (None, "") if asked == "reference" else (native, asked)
