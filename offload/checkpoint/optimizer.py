"""What an optimizer consists of: its groups, and the state of its parameters by the model's names.

A wrapped one hands its fields over chunk by chunk; a plain one has them in memory. Both are saved
alike, so that each can load what the other has saved. Numbers that are not elementwise (step
counts) are in the values, fields in the shards as `<parameter>/<field>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.checkpoint.differences import Differences
from offload.checkpoint.tensors import spec_of, whole, write
from offload.checkpoint.trees import packed, unpacked
from offload.errors import ConfigError, FormatError
from offload.format.safetensors import SIZES, TensorSpec
from offload.layout import MASTER
from offload.log import LOG
from offload.optim import Session, is_wrapped
from offload.optim.optimizer import session_of
from offload.optim.source import Source
from offload.optim.updater import Held
from offload.store.safetensors_file import DTYPES

_NOT_SETTINGS = ("params", "param_names")


class OptimizerContents:
    """Of a wrapped or a plain optimizer as it is now. session: None for a plain one. names: of its
    parameters in the order of its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model_names: Mapping[Tensor, str]) -> None:
        self.optimizer = innermost(optimizer)
        self.session: Session | None = (
            session_of(self.optimizer) if is_wrapped(self.optimizer) else None
        )
        self.params: list[Tensor] = [
            param for group in self.optimizer.param_groups for param in group["params"]
        ]
        self.names = _names(self.optimizer, model_names)
        self._held: list[Held] = []
        self._fields: dict[str, Tensor] = {}  # of a plain one

    @property
    def kind(self) -> str:
        """The name of the class that the user chose."""
        found: type[Any] = type(self.optimizer)
        return (found.__mro__[2] if self.session is not None else found).__name__

    # --- saving -----------------------------------------------------------------------------------

    def look(self) -> tuple[list[TensorSpec], dict[str, Any]]:
        """The fields that will come, and all the rest. Nothing may step before `Session` has begun
        to save them.
        """
        states: dict[str, dict[str, Any]] = {}
        specs: list[TensorSpec] = []
        if self.session is not None:
            self._held = self.session.held()
            for held in self._held:
                name = self.names[held.record.number]
                shape = tuple(held.record.shape)
                specs += [TensorSpec(f"{name}/{field}", "F32", shape) for field in held.fields]
                states[name] = {key: packed(value) for key, value in held.scalars.items()}
        else:
            states = self._look_at_plain()
            specs = [spec_of(name, tensor) for name, tensor in self._fields.items()]
            specs.sort(key=lambda spec: -SIZES[spec.dtype])
        return specs, {"class": self.kind, "groups": self._groups(), "states": states}

    def _look_at_plain(self) -> dict[str, dict[str, Any]]:
        numbers = {param: number for number, param in enumerate(self.params)}
        states: dict[str, dict[str, Any]] = {}
        for param, state in self.optimizer.state.items():
            if not isinstance(param, Tensor) or param not in numbers:
                raise ConfigError(
                    f"optimizer.state: has {type(param).__name__} {param!r:.80}, which is none of "
                    "the optimizer's parameters, and could not be loaded again"
                )
            name = self.names[numbers[param]]
            scalars = states[name] = {}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    self._fields[f"{name}/{key}"] = value
                else:
                    scalars[key] = packed(value)
        return states

    def _groups(self) -> list[dict[str, Any]]:
        found, begin = [], 0
        for group in self.optimizer.param_groups:
            end = begin + len(group["params"])
            settings = {k: v for k, v in group.items() if k not in _NOT_SETTINGS}
            found.append({"params": self.names[begin:end], "settings": settings})
            begin = end
        return found

    def write_plain(self, put: Any) -> None:
        """Hand over the fields that are in memory."""
        for name, tensor in self._fields.items():
            write(name, tensor, put)

    # --- loading ----------------------------------------------------------------------------------

    def match(
        self, saved: Mapping[str, Source], values: Mapping[str, Any], differences: Differences
    ) -> dict[str, Any]:
        """A `state_dict` with sources in the place of fields. What does not fit is noted."""
        parsed = _Parsed.of(values)
        if parsed.kind != self.kind:
            differences.other("optimizer", f"saved from {parsed.kind}, here it is {self.kind}")
        self._match_groups(parsed.params, differences)
        for full, source in saved.items():
            name, _, field = full.rpartition("/")
            parsed.states.setdefault(name, {})[field] = source
        index = {name: number for number, name in enumerate(self.names)}
        self._match_fields(parsed.states, index, differences)
        state = {index[name]: each for name, each in parsed.states.items() if name in index}
        return {"state": state, "param_groups": self._as_groups(parsed.settings)}

    def _match_groups(self, saved: Sequence[Sequence[str]], differences: Differences) -> None:
        mine = [group["params"] for group in self._groups()]
        if len(mine) != len(saved):
            differences.other("param_groups", f"saved {len(saved)}, here there are {len(mine)}")
            return
        for number, (ours, theirs) in enumerate(zip(mine, saved, strict=True)):
            here, there = dict.fromkeys(ours), dict.fromkeys(theirs)
            for name in there:
                if name not in here:
                    differences.extra(f"{name} of param_groups[{number}]")
            for name in here:
                if name not in there:
                    differences.missing(f"{name} of param_groups[{number}]")

    def _match_fields(
        self,
        found: Mapping[str, dict[str, Any]],
        index: Mapping[str, int],
        differences: Differences,
    ) -> None:
        for name, state in found.items():
            if name not in index:
                differences.extra(f"state of {name}")
            elif self.session is not None:
                self._match_state(name, index[name], state, differences)

    def _match_state(
        self, name: str, number: int, state: Mapping[str, Any], differences: Differences
    ) -> None:
        """Of a wrapped optimizer, which knows what it needs."""
        assert self.session is not None
        needed, allowed = self.session.fields_of(number)
        shape = tuple(self.params[number].shape)
        for field in needed:
            if state.get(field) is None and any(v is not None for v in state.values()):
                differences.missing(f"{name}/{field}")
        for field, value in state.items():
            if isinstance(value, Source) and field not in allowed:
                differences.extra(f"{name}/{field}")
            elif isinstance(value, Source) and tuple(value.shape) != shape:
                differences.other(
                    f"{name}/{field}", f"saved as {tuple(value.shape)}, here it is {shape}"
                )

    def _as_groups(self, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """As a `state_dict` has them, with the parameters in our order."""
        found, begin = [], 0
        for own, saved in zip(self.optimizer.param_groups, settings, strict=False):
            end = begin + len(own["params"])
            found.append({**saved, "params": list(range(begin, end))})
            begin = end
        return found

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what the optimizer itself would refuse. Changes nothing."""
        if self.session is not None:
            self.session.check_incoming(state_dict)

    def read(self, state_dict: Mapping[str, Any]) -> None:
        """Make it the optimizer's own. The parameters have been loaded."""
        if self.session is not None:
            self.optimizer.load_state_dict(dict(state_dict))
            return
        states = _in_memory(state_dict["state"], self.params)
        self.optimizer.load_state_dict({**state_dict, "state": states})
        for number, state in states.items():  # torch has rounded numbers to the parameter's type
            kept = self.optimizer.state[self.params[number]]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 0 and self.params[number].dim():
                    kept[key] = value.to(kept[key].device)


class _Parsed(NamedTuple):
    """An optimizer's values in a checkpoint: settings and names of parameters by group, and what
    is not elementwise of each parameter's state.
    """

    kind: str
    settings: list[dict[str, Any]]
    params: list[list[str]]
    states: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Parsed:
        try:
            groups, states = values["groups"], values["states"]
            return cls(
                str(values["class"]),
                [dict(group["settings"]) for group in groups],
                [[str(name) for name in group["params"]] for group in groups],
                {
                    str(name): {str(k): unpacked(v, DTYPES) for k, v in state.items()}
                    for name, state in states.items()
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"checkpoint: its optimizer is none: {error}") from error


def _in_memory(
    states: Mapping[int, Mapping[str, Any]], params: Sequence[Tensor]
) -> dict[int, dict[str, Any]]:
    """For a plain optimizer, which has no masters."""
    if any(MASTER in state for state in states.values()):
        LOG.warning(
            "load: the checkpoint has fp32 masters of 16-bit parameters, which a plain optimizer "
            "cannot keep: they are left out, and moments are rounded; load into a wrapped one "
            "to go on with the same bits"
        )
    return {
        number: {
            key: _like(value, params[number]) if isinstance(value, Source) else value
            for key, value in state.items()
            if key != MASTER
        }
        for number, state in states.items()
    }


def _like(source: Source, param: Tensor) -> Tensor:
    """In the parameter's order of memory: fused steps go by memory alone."""
    found = whole(source)
    if found.shape != param.shape or found.stride() == param.stride():
        return found
    there = torch.empty_strided(param.shape, param.stride(), dtype=found.dtype)
    return there.copy_(found)


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that accelerate's or Lightning's holds."""
    found: Any = optimizer
    while not is_wrapped(found):
        held = getattr(found, "optimizer", None)
        if held is found or not isinstance(held, torch.optim.Optimizer):
            break
        found = held
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    # Lightning's view of one is wrapped, too.
    return session_of(found).optimizer if is_wrapped(found) else found


def _names(optimizer: torch.optim.Optimizer, model_names: Mapping[Tensor, str]) -> list[str]:
    """The model's names; `<group>.<index>` for parameters that the model does not have."""
    taken = set(model_names.values())
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            name = model_names.get(param)
            if name is None:
                name = f"{number}.{index}"
                while name in taken:  # a model may call one of its own so
                    name = f"#{name}"
            found.append(name)
    return found
