"""Export of a checkpoint to formats that other programs read: a Hugging Face model directory, and a
state_dict of torch's own optimizers. Bytes are checked, then copied piece by piece; nothing is ever
whole in memory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.disk import told
from offload.checkpoint.format.manifest import SavedTensor
from offload.checkpoint.format.values import decode
from offload.checkpoint.optimizer import SavedOptimizer
from offload.checkpoint.rank_group import in_files
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.saves import MODEL, OPTIMIZER
from offload.checkpoint.tensors import PIECE_BYTES, fill, parse_memory_formats, viewed
from offload.core.errors import ConfigError, FormatError
from offload.core.portable import reserve
from offload.planning.layout import MASTER
from offload.storage.safetensors_header import build_header

INDEX = "model.safetensors.index.json"


def export_model(reader: CheckpointReader, out: Path, shard_bytes: int) -> list[str]:
    """Write the model to the new directory `out`, whole or not at all; return the files' names.

    A file has at most `shard_bytes` of values, unless one tensor alone has more. Tied weights are
    written once, as `save_pretrained` does.
    """
    tensors = reader.manifest.of_section(MODEL)
    if os.path.lexists(out):
        raise ConfigError(f"{out}: is there already; give a new directory")
    shards = in_files(tensors, lambda tensor: tensor.nbytes, shard_bytes) or [[]]
    hidden = out.parent / f".{out.name}.{secrets.token_hex(8)}.export"
    with told("mkdir", hidden):
        out.parent.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()
    try:
        names = _write_shards(reader, hidden, shards)
        with told("rename", out):
            _sync(hidden)
            os.rename(hidden, out)
            _sync(out.parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return names


def _write_shards(
    reader: CheckpointReader, folder: Path, shards: list[list[SavedTensor]]
) -> list[str]:
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    for name, tensors in zip(names, shards, strict=True):
        _write(folder / name, _shard(reader, tensors))
    if count > 1:
        places = {t.key: n for n, ts in zip(names, shards, strict=True) for t in ts}
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write(folder / INDEX, [json.dumps(index, indent=2).encode() + b"\n"])
        names.append(INDEX)
    return names


def _shard(reader: CheckpointReader, tensors: Sequence[SavedTensor]) -> Iterator[Any]:
    """Yield the bytes of a safetensors file; each piece is valid until the next is requested."""
    yield build_header([tensor.spec for tensor in tensors], {"format": "pt"}, align=8)[0]
    memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
    for tensor in tensors:  # in the order of the header
        source = reader.tensor(tensor.name)
        for begin in range(0, tensor.nbytes, PIECE_BYTES):
            some = memory[: min(PIECE_BYTES, tensor.nbytes - begin)]
            source.read_into(begin, some)
            yield some.numpy().data


def _write(path: Path, pieces: Iterable[Any]) -> None:
    with told("write", path), open(path, "xb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- optimizer ------------------------------------------------------------------------------------


def optimizer_state(reader: CheckpointReader, folder: Path) -> dict[str, Any]:
    """Return a state_dict in the form of the optimizer's own class. Its fields are tensors mapped
    from unnamed files in `folder`, in their parameters' memory order. Master weights of 16-bit
    parameters, which torch's optimizers do not have, are left out.
    """
    if OPTIMIZER not in reader.manifest.values:
        raise ConfigError(f"{reader.path}: has no optimizer in it")
    tree = decode(reader.manifest.values[OPTIMIZER], lambda name: _mapped(reader, name, folder))
    SavedOptimizer.of(tree, {})  # refuses what is none, before fields are written to `folder`
    orders = parse_memory_formats(tree) or {}
    fields = {
        tensor.key: _mapped(reader, tensor.name, folder, orders.get(tensor.key.rpartition("/")[0]))
        for tensor in reader.manifest.of_section(OPTIMIZER)
        if not _is_master(tensor)
    }
    saved = SavedOptimizer.of(tree, fields)
    index = {name: number for number, name in enumerate(chain.from_iterable(saved.params))}
    try:
        state = {index[name]: each for name, each in saved.states.items()}
    except KeyError as error:
        raise FormatError(f"{reader.path}: it holds no valid optimizer state: {error}") from error
    groups = [
        {**settings, "params": [index[name] for name in params]}
        for settings, params in zip(saved.settings, saved.params, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def has_masters(reader: CheckpointReader) -> bool:
    return any(map(_is_master, reader.manifest.of_section(OPTIMIZER)))


def _is_master(field: SavedTensor) -> bool:
    return field.key.rpartition("/")[2] == MASTER


def of_unknown_order(reader: CheckpointReader) -> list[str]:
    """Return the parameters that may have been channels_last, if the checkpoint is of an old
    version, which does not record the memory order.
    """
    tree = decode(reader.manifest.values.get(OPTIMIZER), lambda name: torch.empty(0, device="meta"))
    if not isinstance(tree, Mapping) or parse_memory_formats(tree) is not None:
        return []
    fields = reader.manifest.of_section(OPTIMIZER)
    return sorted({t.key.rpartition("/")[0] for t in fields if len(t.shape) > 2})


def _mapped(
    reader: CheckpointReader, name: str, folder: Path, order: Sequence[int] | None = None
) -> Tensor:
    """Map the tensor from a file of its own, which has no name any more. order: the order of its
    dimensions in memory; ignored if it has another number of dimensions.
    """
    source = reader.tensor(name)
    dtype, shape = source.dtype, tuple(source.shape)
    numel = torch.Size(shape).numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with told("map a file", folder), tempfile.NamedTemporaryFile(dir=folder) as file:
        reserve(file.fileno(), numel * dtype.itemsize)
        found = torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
    if order is None or len(order) != len(shape):
        order = range(len(shape))
    found = viewed(found, shape, order)
    fill(found, source)
    return found
