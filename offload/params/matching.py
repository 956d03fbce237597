"""The match of a model's tensors with the tensors of its weights: a check of names, shapes and
types.

Tied parameters may be in the weights under any of their names; under several, if the values are
equal. Names are also tried without the modules that peft has put around others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from offload.core.errors import ConfigError, FormatError
from offload.core.log import LOG
from offload.params.initialise import made_by_adapters
from offload.storage.safetensors_file import Entry, SafetensorsFile
from offload.storage.weights import Weights

_MOST_LISTED = 20
_COMPARED_BYTES = 1 << 20


class WeightPlace(NamedTuple):
    """The file and the entry that hold a tensor's values."""

    file: SafetensorsFile
    entry: Entry


@dataclass(frozen=True)
class WeightMatch:
    """The places of the model's tensors in the weights.

    kept: names of tensors that are not in the weights and keep the values they have.
    """

    places: dict[Tensor, WeightPlace] = field(default_factory=dict)
    kept: tuple[str, ...] = ()


def match(model: nn.Module, weights: Weights) -> WeightMatch:
    """Find each tensor of the model in the weights. Changes nothing.

    Raise `ConfigError` with all names that do not fit together. A tensor that the weights lack is
    an error, with three exceptions: parameters in memory of a model whose others are on the meta
    device (adapters, for example) keep their values; buffers that a state_dict leaves out may be
    missing; so may adapters that peft can fill.
    """
    names = list(_names(model))
    tensors = {alias: tensor for name, tensor in names for alias in _aliases(name)}
    tensors |= dict(names)
    found: dict[Tensor, list[WeightPlace]] = {}
    for name, place in weights.entries.items():
        if name in tensors:
            found.setdefault(tensors[name], []).append(WeightPlace(*place))
    unexpected = [name for name in weights.entries if name not in tensors]
    missing, kept = _missing(model, found)
    complaints = [
        *_listed("it does not have", missing),
        *_listed("the model has no", _not_ignored(model, unexpected)),
        *_listed("expected as in the model", _misfits(names, found)),
    ]
    if complaints:
        hint = (
            " (what is not in the weights keeps its values only if the rest is on the meta device)"
        )
        raise ConfigError(
            f"weights: {weights.path} does not fit the model: {'; '.join(complaints)}"
            + (hint if missing else "")
        )
    for places in found.values():
        _check_same(places)
    _tell_of_casts(found)
    return WeightMatch({tensor: places[0] for tensor, places in found.items()}, tuple(kept))


def _names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _aliases(name: str) -> Iterator[str]:
    """Yield the name that a tensor had before peft put a layer of its own around the tensor's
    module.
    """
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    if bare != name:
        yield bare


def _missing(
    model: nn.Module, found: dict[Tensor, list[WeightPlace]]
) -> tuple[list[str], list[str]]:
    """Return the names of tensors that would have no values, and of those that keep theirs."""
    has_meta = any(param.is_meta for param in model.parameters())
    passing: set[Tensor] = {
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }
    for module in model.modules():
        passing |= {tensor for tensor in made_by_adapters(module) if tensor.is_meta}
    missing: list[str] = []
    kept: list[str] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor in found or tensor in passing:
            continue
        (kept if has_meta and not tensor.is_meta else missing).append(name)
    return missing, kept


def _not_ignored(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names without those that a Hugging Face model declares as unused."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    has_rotary = any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers())
    patterns = [*patterns, *([r"rotary_emb\.inv_freq"] if has_rotary else [])]
    return [name for name in names if not any(re.search(p, name) for p in patterns)]


def _misfits(
    names: Iterable[tuple[str, Tensor]], found: dict[Tensor, list[WeightPlace]]
) -> Iterator[str]:
    for name, tensor in dict((tensor, (name, tensor)) for name, tensor in names).values():
        for _, entry in found.get(tensor, ()):
            if entry.shape != tuple(tensor.shape):
                yield f"{name} of shape {tuple(tensor.shape)}, got {entry.shape}"
            elif entry.dtype != tensor.dtype and not (
                entry.dtype.is_floating_point and tensor.dtype.is_floating_point  # it is cast
            ):
                yield f"{name} of {tensor.dtype}, got {entry.dtype}"


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return [f"{what} {', '.join(names[:_MOST_LISTED])}{more}"]


def _check_same(places: list[WeightPlace]) -> None:
    """Check that a tied parameter has the same values under all its names."""
    first = places[0]
    for other in places[1:]:
        if first.entry.dtype != other.entry.dtype or not _are_equal(first, other):
            raise FormatError(
                f"weights: {first.entry.name} and {other.entry.name} are one parameter of the "
                f"model, but {first.file.path} and {other.file.path} have different values for "
                "them; leave one out, or untie them"
            )


def _are_equal(one: WeightPlace, other: WeightPlace) -> bool:
    left, right = bytearray(_COMPARED_BYTES), bytearray(_COMPARED_BYTES)
    for begin in range(0, one.entry.nbytes, _COMPARED_BYTES):
        nbytes = min(_COMPARED_BYTES, one.entry.nbytes - begin)
        one.file.read_into(one.entry.offset + begin, memoryview(left)[:nbytes])
        other.file.read_into(other.entry.offset + begin, memoryview(right)[:nbytes])
        if left[:nbytes] != right[:nbytes]:
            return False
    return True


def _tell_of_casts(found: dict[Tensor, list[WeightPlace]]) -> None:
    casts = Counter((places[0].entry.dtype, tensor.dtype) for tensor, places in found.items())
    for (given, wanted), count in casts.items():
        if given != wanted:
            LOG.info("weights: %d tensors are cast from %s to %s", count, given, wanted)
