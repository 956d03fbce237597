"""Trees of plain values and tensors: states of schedulers and other objects, and the user's extra.

Their tensors lie in shards of their own (`OTHER`); the tree has their names in their places.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.format.values import encode
from offload.checkpoint.rank_group import TensorToSave
from offload.checkpoint.shard import Shards
from offload.checkpoint.tensors import NAMES, each_piece, spec_of, write
from offload.core.errors import ConfigError, FormatError
from offload.device.accelerator import device_random_states, set_device_random_states
from offload.storage.safetensors_header import SIZES

OTHER = "other"


class SavedTreeTensors:
    """The tensors of all trees of one checkpoint, each once. They are referenced, not copied."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # by their names in the shards
        self._known: dict[int, str] = {}

    def encode(self, section: str, tree: Any) -> Any:
        """Encode the tree for the manifest; a `ConfigError` names what cannot be saved."""

        def put(leaf: Any) -> str | None:
            if not isinstance(leaf, Tensor):
                return None
            if id(leaf) not in self._known:
                name = self._known[id(leaf)] = f"{section}.{len(self.tensors)}"
                spec_of("a tensor", leaf)
                self.tensors[name] = leaf
            return f"{OTHER}/{self._known[id(leaf)]}"

        try:
            return encode(tree, put, _without_numpy)
        except ConfigError as error:
            raise ConfigError(f"save: {section}: {error}") from error

    def digest(self, section: str, encoded: Any) -> str:
        """Return a digest of an encoded tree with the values of its tensors."""
        found = hashlib.sha256(json.dumps(encoded).encode())
        for name, tensor in self.tensors.items():
            if name.startswith(f"{section}."):
                for _, piece in each_piece(tensor):
                    found.update(piece.numpy().tobytes())
        return found.hexdigest()[:16]

    def holdings(self) -> list[TensorToSave]:
        """Return what the first rank writes of the tensors: all of it. Widest types come first, so
        that each begins at a multiple of its size.
        """
        specs = [spec_of(name, tensor) for name, tensor in self.tensors.items()]
        specs.sort(key=lambda spec: -SIZES[spec.dtype])
        return [TensorToSave(spec, ((0, spec.nbytes),)) for spec in specs]

    def write(self, sink: Shards) -> None:
        for name, tensor in self.tensors.items():
            write(name, tensor, sink)


def _without_numpy(value: Any) -> Any:
    """Return a scalar of numpy's as a Python number; anything else as it is."""
    numpy = sys.modules.get("numpy")
    is_scalar = numpy is not None and isinstance(value, numpy.generic)
    return value.item() if is_scalar else value


# --- single numbers -------------------------------------------------------------------------------


def packed(value: Any) -> Any:
    """Pack a number that may be a tensor without dimensions, such as a step count: its bits are in
    the tree itself, for there is one for each parameter.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in NAMES:
        ((_, bits),) = each_piece(value)
        return {"tensor": NAMES[value.dtype], "bits": bytes(bits.tolist())}
    return {"value": value}


def unpacked(held: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> Any:
    """Unpack what `packed` returned. Raises `FormatError` for anything else."""
    if set(held) == {"value"}:
        return held["value"]
    dtype, bits = dtypes.get(str(held.get("tensor"))), held.get("bits")
    if dtype is None or not isinstance(bits, bytes) or len(bits) != dtype.itemsize:
        raise FormatError(f"checkpoint: expected a number of a state, got {str(held)[:200]}")
    with torch.inference_mode(False):
        return torch.frombuffer(bytearray(bits), dtype=dtype).reshape(())


# --- random numbers -------------------------------------------------------------------------------
# The states of all generators: Python's, numpy's if imported, torch's, the devices'.


def random_states() -> dict[str, Any]:
    """Return the states as a tree of plain values."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "torch": bytes(torch.get_rng_state().tolist()),
        "devices": device_random_states(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, tuple(keys.tolist()), *rest)
    return found


def check_random_states(states: Any) -> None:
    """Try the states on new generators that no other code uses. Raises `FormatError`."""
    try:
        random.Random().setstate(states["python"])
        torch.Generator("cpu").set_state(_tensor(states["torch"]))
        if any(not isinstance(each, bytes) for each in states["devices"]):
            raise TypeError("expected bytes for devices")
        if "numpy" in states:
            importlib.import_module("numpy").random.RandomState().set_state(states["numpy"])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(
            f"checkpoint: its random numbers are not as a save writes them ({error!r}), though its "
            "bytes are whole; something else has made it: take another checkpoint"
        ) from error


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set all generators to these states, which have been checked."""
    random.setstate(states["python"])
    torch.set_rng_state(_tensor(states["torch"]))
    set_device_random_states(states["devices"])
    if "numpy" in states:
        importlib.import_module("numpy").random.set_state(states["numpy"])


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
