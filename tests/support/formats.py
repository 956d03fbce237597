"""Small checkpoints written by the plainest means, for the tests of their readers."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint.format.manifest import MANIFEST, CheckedPart, Manifest, SavedTensor
from offload.storage.safetensors_header import TensorSpec, build_header

PART_BYTES = 100  # small, so that most tensors have several parts

MODEL = (
    TensorSpec("layer.weight", "F32", (5, 13)),
    TensorSpec("layer.bias", "F32", (5,)),
    TensorSpec("norm ä", "BF16", (7,)),
    TensorSpec("empty", "F32", (0, 3)),
    TensorSpec("scalar", "I64", ()),
)
OPTIMIZER = (
    TensorSpec("layer.weight/exp_avg", "F32", (5, 13)),
    TensorSpec("layer.weight/exp_avg_sq", "F32", (5, 13)),
    TensorSpec("layer.bias/exp_avg", "F32", (5,)),
)
OTHER = (TensorSpec("rng/torch", "U8", (1000,)),)
SHARDS: Mapping[str, tuple[TensorSpec, ...]] = {
    "model-00001.safetensors": MODEL[:2],
    "model-00002.safetensors": MODEL[2:],
    "optimizer-00001.safetensors": OPTIMIZER,
    "other-00001.safetensors": OTHER,
}
VALUES: dict[str, Any] = {
    "optimizer": {
        "dict": {"step": 7, "groups": [{"dict": {"lr": 1e-3, "betas": {"tuple": [0.9]}}}]}
    },
    "rng": {"dict": {"torch": {"tensor": "other/rng/torch"}}},
    "extra": None,
}


def write_shard(
    directory: Path, name: str, specs: tuple[TensorSpec, ...], seed: int
) -> tuple[int, list[SavedTensor]]:
    """Write a shard of random bytes; return the file's size and its tensors."""
    draw = random.Random(seed)
    header, places = build_header(specs)
    data, saved = bytearray(header), []
    for key, place in places.items():
        assert place.offset == len(data)
        raw = draw.randbytes(place.nbytes)
        data += raw
        parts = tuple(
            CheckedPart(name, place.offset + i, len(piece), zlib.crc32(piece))
            for i in range(0, max(place.nbytes, 1), PART_BYTES)
            for piece in (raw[i : i + PART_BYTES],)
        )
        full = f"{name.partition('-')[0]}/{key}"
        saved.append(SavedTensor(full, place.dtype, place.shape, parts))
    path = directory / name
    path.write_bytes(data)
    path.chmod(0o600)
    return len(data), saved


def write_checkpoint(
    directory: Path,
    number: int = 1,
    shards: Mapping[str, tuple[TensorSpec, ...]] = SHARDS,
    values: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a whole checkpoint of random bytes."""
    directory.mkdir(mode=0o700, parents=True)
    files: dict[str, int] = {}
    tensors: dict[str, SavedTensor] = {}
    for seed, (name, specs) in enumerate(shards.items()):
        files[name], saved = write_shard(directory, name, specs, seed)
        tensors |= {tensor.name: tensor for tensor in saved}
    manifest = Manifest(
        number=number,
        created_s=1_800_000_000,
        fingerprint="0123456789abcdef",
        files=files,
        tensors=tensors,
        values=VALUES if values is None else values,
    )
    put_manifest(directory, manifest.to_bytes())
    return manifest


def put_manifest(directory: Path, text: bytes) -> None:
    path = directory / MANIFEST
    path.unlink(missing_ok=True)
    path.write_bytes(text)
    path.chmod(0o600)
