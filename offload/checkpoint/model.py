"""The contents of a model: the tensors of its `state_dict`, by name, each once.

The parameters of a prepared model are fetched to host memory unit by unit. Names that share a
parameter (tied weights) are saved once, under the first of them; the others are its aliases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from offload.checkpoint.rank_group import TensorToSave
from offload.checkpoint.shard import Shards
from offload.checkpoint.tensors import (
    NAMES,
    fill,
    has_values_of,
    holding_of,
    sample,
    spec_of,
    write,
)
from offload.core.errors import ConfigError, FormatError
from offload.distributed.placing import is_sharded
from offload.optim.source import FieldSource
from offload.params.prepared import Prepared
from offload.planning.unit import Unit

_EXTRA = "_extra_state"  # torch's name for the state that a module adds by itself
_SHOWN = 20  # differences of one kind


class ModelContents:
    """The contents of a model as it is now; no values are touched.

    tensors: by the first name of each. aliases: the first name, by each further one. additions: the
    extra states of modules. names: the model's names of the parameters among the tensors.
    """

    def __init__(self, model: nn.Module, keeper: Prepared | None = None) -> None:
        self._model = model
        self._keeper = keeper
        self._unit_of: Mapping[Tensor, Unit] = keeper.prepare_plan.unit_of if keeper else {}
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
                spec_of(name, value, to_fill=True)  # refuses what could not be loaded
                first[id(value)] = name
                self.tensors[name] = value
        self.names: dict[Tensor, str] = {
            param: name for name, param in model.named_parameters() if id(param) in first
        }

    # --- saving -----------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        return {"aliases": dict(self.aliases), "additions": self.additions}

    @property
    def fingerprint(self) -> str:
        """The digest of all names, types and shapes."""
        lines = []
        for name in sorted((*self.tensors, *self.aliases)):
            tensor = self.tensors[self.aliases.get(name, name)]
            lines.append(f"{name} {NAMES.get(tensor.dtype)} {list(tensor.shape)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def holdings(self, is_first: bool) -> list[TensorToSave]:
        """Return which bytes of each tensor this rank writes. All ranks have the same parameters,
        or each has its part of them. Buffers may differ (running means of what each rank has seen):
        those of the first rank are saved.
        """
        return [
            holding_of(name, tensor, self._own(tensor, is_first))
            for name, tensor in self.tensors.items()
        ]

    def _own(self, tensor: Tensor, is_first: bool) -> tuple[int, int] | None:
        if not isinstance(tensor, nn.Parameter):
            return (0, tensor.numel()) if is_first else (0, 0)
        return self._keeper.prepare_plan.own_of(tensor) if self._keeper is not None else None

    def samples(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return sample checksums: of parameters that should be the same on all ranks, and of
        buffers. Sharded tensors and the parameters of a prepared model, which may be in another
        tier, are left out.
        """
        params: dict[str, str] = {}
        buffers: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            is_kept = tensor in self._unit_of
            if not is_kept and not is_sharded(tensor):
                found = params if isinstance(tensor, nn.Parameter) else buffers
                found[name] = f"{sample(tensor):08x}"
        return params, buffers

    def write(self, sink: Shards) -> None:
        """Write all values, as they are now, to the sink."""

        def choose(number: int | None, names: Sequence[str]) -> Sequence[str] | None:
            wanted = [name for name in names if sink.wants(name, 0, self.tensors[name].nbytes)]
            return wanted if wanted or self._is_shared else None

        self._visit(choose, lambda name: write(name, self.tensors[name], sink))

    @property
    def _is_shared(self) -> bool:
        """Whether ranks share the parameters; then a unit is fetched on all of them, or on none."""
        return self._keeper is not None and self._keeper.ranks is not None

    def _visit(
        self,
        choose: Callable[[int | None, Sequence[str]], Sequence[str] | None],
        act: Callable[[str], None],
        to_change: bool = False,
    ) -> None:
        """Call `act` with the names that `choose` takes of each unit's, while the unit is in host
        memory; None: it need not be. An error on one of the ranks that share the units does not
        keep the other ranks from fetching them: the first is raised at the end.
        """
        units: dict[int | None, list[str]] = {}
        for name, tensor in self.tensors.items():
            unit = self._unit_of.get(tensor)
            units.setdefault(unit.number if unit is not None else None, []).append(name)
        errors: list[Exception] = []
        for number, names in units.items():
            with self._noting(errors):
                chosen = choose(number, names)
                if chosen is not None:
                    with self._at_hand(number, to_change), self._noting(errors):
                        for name in chosen:
                            act(name)
        if errors:
            raise errors[0]

    @contextmanager
    def _noting(self, errors: list[Exception]) -> Iterator[None]:
        """Note an error of the block where ranks share the units; elsewhere it is raised."""
        try:
            yield
        except Exception as error:
            if not self._is_shared:
                raise
            errors.append(error)

    def _at_hand(self, number: int | None, to_change: bool = False) -> AbstractContextManager[None]:
        if number is None or self._keeper is None:
            return nullcontext()
        return self._keeper.at_hand(number, to_change)

    # --- loading ----------------------------------------------------------------------------------

    def match(
        self, saved: Mapping[str, FieldSource], values: Mapping[str, Any], differences: Differences
    ) -> dict[str, FieldSource]:
        """Return the source of each tensor. Notes in `differences` what does not fit."""
        aliases, additions = _parse(values)
        names = dict.fromkeys((*self.tensors, *self.aliases))
        differences.extra += [name for name in (*saved, *aliases) if name not in names]
        found: dict[str, FieldSource] = {}
        for name in names:
            source = saved.get(aliases.get(name, name))
            mine = self.aliases.get(name, name)
            if source is None:
                differences.missing.append(name)
            elif mine in found and found[mine] is not source:
                differences.other(name, f"a tensor of its own is saved, here it is tied to {mine}")
            else:
                found[mine], tensor = source, self.tensors[mine]
                if (tensor.dtype, tuple(tensor.shape)) != (source.dtype, tuple(source.shape)):
                    differences.other(
                        name,
                        f"saved as {source.dtype} {tuple(source.shape)}, here it is {tensor.dtype} "
                        f"{tuple(tensor.shape)}",
                    )
        differences.extra += additions.keys() - self.additions.keys()
        differences.missing += self.additions.keys() - additions.keys()
        return found

    def read(self, sources: Mapping[str, FieldSource], additions: Mapping[str, Any]) -> None:
        """Load all these values into the model."""

        def choose(number: int | None, names: Sequence[str]) -> Sequence[str] | None:
            return None if self._has_already(number, names, sources) else names

        self._visit(choose, lambda name: fill(self.tensors[name], sources[name]), to_change=True)
        for name, value in additions.items():
            module = self._model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(value)

    def _has_already(
        self, number: int | None, names: Sequence[str], sources: Mapping[str, FieldSource]
    ) -> bool:
        """Return whether a frozen unit of a prepared model has these values already. Such a unit
        may be read from files that are not the engine's, and stays there as long as nothing in it
        changes.
        """
        if number is None or any(self.tensors[name].requires_grad for name in names):
            return False
        with self._at_hand(number):
            return all(has_values_of(self.tensors[name], sources[name]) for name in names)


def _parse(values: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Parse the aliases and additions from a model's values in a checkpoint."""
    try:
        aliases = {str(name): str(first) for name, first in values["aliases"].items()}
        return aliases, dict(values["additions"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"checkpoint: it holds no valid model: {error}") from error


class Differences:
    """The differences between a checkpoint and what it is loaded into, by name, reported together.
    what: both sides, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.missing: list[str] = []  # names that are here, but were not saved
        self.extra: list[str] = []  # names that were saved, but are not here
        self._other: list[str] = []

    def other(self, name: str, how: str) -> None:
        """Note a name that is on both sides, and how the two differ."""
        self._other.append(f"{name} ({how})")

    def check(self) -> None:
        """Raise a `ConfigError` if there are any; it names 20 of each kind, and counts all."""
        kinds = (
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.extra),
            ("different", self._other),
        )
        told = "; ".join(_listed(what, names) for what, names in kinds if names)
        if told:
            raise ConfigError(
                f"{self._what}: they do not fit together, and nothing was changed: {told}"
            )


def _listed(what: str, names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} ({len(names)}): {', '.join(names[:_SHOWN])}{rest}"
