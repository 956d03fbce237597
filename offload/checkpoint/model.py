"""What a model consists of: the tensors of its `state_dict`, by name, each once.

Of a prepared model the parameters come to host memory unit by unit. Names that share a parameter
(tied weights) are saved once, under the first of them; the others are its aliases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from offload.checkpoint.differences import Differences
from offload.checkpoint.tensors import NAMES, fill, has_values_of, spec_of, write
from offload.errors import ConfigError, FormatError
from offload.format.safetensors import TensorSpec
from offload.optim.source import Source

_EXTRA = "_extra_state"  # what torch calls the state that a module adds by itself

Put = Callable[[str, int, Tensor], None]  # name, first byte, values


class Keeper(Protocol):
    """A prepared model: it has the parameters, and brings them."""

    def unit_of(self, param: Tensor) -> int | None:
        """None: not one of its own."""

    def at_hand(self, number: int, to_change: bool = False) -> AbstractContextManager[None]:
        """The unit's parameters are in host memory inside."""


class ModelContents:
    """Made from the model as it is now; no values are touched. tensors: by the first name. names:
    of parameters, as the model calls them.
    """

    def __init__(self, model: nn.Module, keeper: Keeper | None = None) -> None:
        self._model = model
        self._keeper = keeper
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.additions: dict[str, Any] = {}
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        first: dict[int, str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == _EXTRA:
                self.additions[name] = value
            elif id(value) not in own:
                raise ConfigError(
                    f"{name}: is in the model's state_dict(), but is none of its parameters and "
                    "buffers (a hook has made it?), so that it could not be loaded; save such a "
                    "model by its state_dict()"
                )
            elif id(value) in first:
                self.aliases[name] = first[id(value)]
            else:
                first[id(value)] = name
                self.tensors[name] = value
        self.names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}

    # --- saving -----------------------------------------------------------------------------------

    def specs(self) -> list[TensorSpec]:
        return [spec_of(name, tensor) for name, tensor in self.tensors.items()]

    def values(self) -> dict[str, Any]:
        return {"aliases": dict(self.aliases), "additions": self.additions}

    @property
    def fingerprint(self) -> str:
        """Of all names, types and shapes."""
        lines = []
        for name in sorted((*self.tensors, *self.aliases)):
            tensor = self.tensors[self.aliases.get(name, name)]
            lines.append(f"{name} {NAMES.get(tensor.dtype)} {list(tensor.shape)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def write(self, put: Put) -> None:
        """Hand all values over, as they are now."""
        for number, names in self._by_unit().items():
            with self._at_hand(number):
                for name in names:
                    write(name, self.tensors[name], put)

    def _by_unit(self) -> dict[int | None, list[str]]:
        found: dict[int | None, list[str]] = {}
        for name, tensor in self.tensors.items():
            unit = self._keeper.unit_of(tensor) if self._keeper is not None else None
            found.setdefault(unit, []).append(name)
        return found

    def _at_hand(self, number: int | None, to_change: bool = False) -> AbstractContextManager[None]:
        if number is None or self._keeper is None:
            return nullcontext()
        return self._keeper.at_hand(number, to_change)

    # --- loading ----------------------------------------------------------------------------------

    def match(
        self, saved: Mapping[str, Source], values: Mapping[str, Any], differences: Differences
    ) -> dict[str, Source]:
        """The source of each tensor. What does not fit is noted."""
        aliases, additions = _parse(values)
        self.specs()  # refuses what cannot be filled
        names = [*self.tensors, *self.aliases]
        for name in (*saved, *aliases):
            if name not in self.tensors and name not in self.aliases:
                differences.extra(name)
        found: dict[str, Source] = {}
        for name in names:
            source = saved.get(aliases.get(name, name))
            mine = self.aliases.get(name, name)
            if source is None:
                differences.missing(name)
            elif mine in found and found[mine] is not source:
                differences.other(name, f"a tensor of its own is saved, here it is tied to {mine}")
            else:
                found[mine] = source
                _compare(name, self.tensors[mine], source, differences)
        self._match_additions(additions, differences)
        return found

    def _match_additions(self, saved: Mapping[str, Any], differences: Differences) -> None:
        for name in saved.keys() - self.additions.keys():
            differences.extra(name)
        for name in self.additions.keys() - saved.keys():
            differences.missing(name)

    def read(self, sources: Mapping[str, Source], additions: Mapping[str, Any]) -> None:
        """Make all these values the model's own."""
        for number, names in self._by_unit().items():
            if not self._has_already(number, names, sources):
                with self._at_hand(number, to_change=True):
                    for name in names:
                        fill(self.tensors[name], sources[name])
        for name, value in additions.items():
            module = self._model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(value)

    def _has_already(
        self, number: int | None, names: list[str], sources: Mapping[str, Source]
    ) -> bool:
        """Frozen units of prepared models may be read from files that are not ours; they stay there
        as long as nothing in them changes.
        """
        if number is None or any(self.tensors[name].requires_grad for name in names):
            return False
        with self._at_hand(number):
            return all(has_values_of(self.tensors[name], sources[name]) for name in names)


def _parse(values: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Aliases and additions, out of a model's values in a checkpoint."""
    try:
        aliases = {str(name): str(first) for name, first in values["aliases"].items()}
        return aliases, dict(values["additions"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"checkpoint: its model is none: {error}") from error


def _compare(name: str, tensor: Tensor, source: Source, differences: Differences) -> None:
    if tensor.dtype != source.dtype or tuple(tensor.shape) != tuple(source.shape):
        differences.other(
            name,
            f"saved as {source.dtype} {tuple(source.shape)}, here it is {tensor.dtype} "
            f"{tuple(tensor.shape)}",
        )
