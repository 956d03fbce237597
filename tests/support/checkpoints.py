"""Small checkpoints with known bytes, for the tests of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.writer import CheckpointWriter
from offload.storage.safetensors_header import TensorSpec

Bytes = npt.NDArray[np.uint8]
Contents = Mapping[str, Mapping[str, Bytes]]  # section -> name -> bytes
KIB = 1 << 10
SMALL = 64 * KIB  # the least that a writer's buffers may have: buffers of one block


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def contents_of(seed: int) -> dict[str, dict[str, Bytes]]:
    """Make two sections, with tensors of odd sizes that share blocks, and an empty tensor."""
    sizes = {
        "model": {"a": 5000, "empty": 0, "b": 1, "c": 12288, "d": 3},
        "optimizer": {"a/exp_avg": 9001, "step": 8},
    }
    return {
        section: {name: random_bytes(n, seed * 100 + i) for i, (name, n) in enumerate(each.items())}
        for section, each in sizes.items()
    }


def specs(tensors: Mapping[str, Bytes]) -> list[TensorSpec]:
    return [TensorSpec(name, "U8", (data.nbytes,)) for name, data in tensors.items()]


def fill(writer: CheckpointWriter, contents: Contents) -> None:
    for section, tensors in contents.items():
        shard = writer.open_shard(section, specs(tensors))
        for name, data in tensors.items():
            shard.write(name, 0, data)


def save(
    path: Path | str,
    contents: Contents,
    keep: int | None = None,
    fingerprint: str = "abc123",
    **options: Any,
) -> Path:
    with CheckpointWriter(path, **options) as writer:
        fill(writer, contents)
        return writer.commit({"extra": 7}, fingerprint, keep=keep)


def read(path: Path) -> dict[str, dict[str, Bytes]]:
    """Read all bytes of a checkpoint, and check every one."""
    found: dict[str, dict[str, Bytes]] = {}
    with CheckpointReader(path) as reader:
        reader.check()
        for name, tensor in reader.manifest.tensors.items():
            data = np.empty(tensor.nbytes, dtype=np.uint8)
            reader.tensor(name).read_into(0, data)
            found.setdefault(tensor.section, {})[tensor.key] = data
    return found


def same(found: Contents, expected: Contents) -> bool:
    return {s: {n: d.tobytes() for n, d in each.items()} for s, each in found.items()} == {
        s: {n: d.tobytes() for n, d in each.items()} for s, each in expected.items()
    }


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
