"""The contents of an optimizer: its groups, and its state by the model's names of the parameters.

A wrapped optimizer delivers its fields chunk by chunk; a plain one has them in memory. Both are
saved alike, so that each can load what the other has saved. Numbers that are not elementwise (step
counts) are in the values, fields in the shards as `<parameter>/<field>`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.checkpoint.model import Differences
from offload.checkpoint.rank_group import Range, RankGroup, TensorToSave
from offload.checkpoint.shard import Shards
from offload.checkpoint.tensors import (
    StridedState,
    bytes_here,
    fill,
    holding_of,
    local_part,
    order_of,
    own_bytes,
    sample,
    write,
)
from offload.checkpoint.trees import packed, unpacked
from offload.core.errors import ConfigError, FormatError
from offload.core.tensors import is_row_major
from offload.distributed.placing import is_sharded, like
from offload.optim import Session, inner_optimizer, is_wrapped
from offload.optim.export import ParamOptimizerState
from offload.optim.recipe import Record
from offload.optim.saver import Saver
from offload.optim.source import FieldSource, whole
from offload.planning.layout import ELEMENT_BYTES, MASTER
from offload.storage.safetensors_file import DTYPES
from offload.storage.safetensors_header import SIZES, TensorSpec

_NOT_SETTINGS = ("params", "param_names")
# How a step is computed, not what: each optimizer keeps its own settings.
_WAYS = ("fused", "foreach", "capturable", "differentiable")


class OptimizerContents:
    """The contents of a wrapped or a plain optimizer as it is now. session: None for a plain one.
    names: of its parameters, in the order of its groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model_names: Mapping[Tensor, str],
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        """Name the optimizer's parameters. stateful: the objects that are saved beside model and
        optimizer; modules among them may own parameters of the optimizer. Raises `ConfigError` for
        a parameter whose value would not be saved.
        """
        self.optimizer = innermost(optimizer)
        found = self.optimizer
        self.session: Session | None = found._offload_session if is_wrapped(found) else None
        self.params: list[Tensor] = [
            param for group in self.optimizer.param_groups for param in group["params"]
        ]
        self._group_names = _names(self.optimizer, model_names, stateful or {})
        self.names = list(chain.from_iterable(self._group_names))
        self.held: list[ParamOptimizerState] = []
        self.strided = StridedState([])
        self._fields: dict[str, Tensor] = {}  # of a plain optimizer

    @property
    def kind(self) -> str:
        """The name of the optimizer class that the user chose."""
        found: type[Any] = type(self.optimizer)
        return (found.__mro__[2] if self.session is not None else found).__name__

    # --- saving -----------------------------------------------------------------------------------

    def look(self, rank_group: RankGroup) -> tuple[list[TensorToSave], dict[str, Any]]:
        """Return which bytes of which fields this rank writes, and all other values. No step may
        run before `Session` has begun to save the fields.
        """
        states: dict[str, dict[str, Any]] = {}
        found: list[TensorToSave] = []
        if self.session is not None:
            self.held = self.session.held()
            for held in self.held:
                name = self.names[held.record.number]
                shape = tuple(held.record.param.shape)  # the whole shape, where ranks share it
                own = _own_bytes(held.record, rank_group)
                found += [
                    TensorToSave(TensorSpec(f"{name}/{field}", "F32", shape), own)
                    for field in held.fields
                ]
                states[name] = {key: packed(value) for key, value in held.scalars.items()}
        else:
            states = self._look_at_plain()
            found = [holding_of(name, tensor) for name, tensor in self._fields.items()]
            found.sort(key=lambda each: -SIZES[each.spec.dtype])
        orders = zip(self.names, map(order_of, self.params), strict=True)
        return found, {
            "class": self.kind,
            "groups": self._groups(),
            "states": states,
            "orders": {name: order for name, order in orders if order is not None},
        }

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
        return [
            {
                "params": names,
                "settings": {k: v for k, v in group.items() if k not in _NOT_SETTINGS},
            }
            for names, group in zip(self._group_names, self.optimizer.param_groups, strict=True)
        ]

    def samples(self) -> dict[str, str]:
        """Return sample checksums of the fields that all ranks should have the same of."""
        fields = {name: each for name, each in self._fields.items() if not is_sharded(each)}
        return {name: f"{sample(tensor):08x}" for name, tensor in fields.items()}

    def begin_saving(self, sink: Shards) -> Saver | None:
        """Write the fields of a plain optimizer, which are in memory, to the sink. Begin a snapshot
        of those of a wrapped one, which the sink receives later.
        """
        if self.session is None:
            for name, tensor in self._fields.items():
                write(name, tensor, sink)
            return None
        first = [bytes_here("", param, ELEMENT_BYTES)[0] for param in self.params]
        strided = self.strided = StridedState(self.held)

        def put(number: int, field: str, begin: int, values: Tensor) -> None:
            whole: Tensor | None = values
            if strided.takes(number, field):
                begin, whole = 0, strided.add(number, field, begin, values)
            if whole is not None:
                sink.write(f"{self.names[number]}/{field}", first[number] + begin, whole)

        return self.session.updater.begin_saving(put)

    def write_strided(self, rank_group: RankGroup, sink: Shards) -> None:
        """Write what the ranks must put together first. Blocks until all have called it."""
        for number, field, values in self.strided.gathered(rank_group):
            sink.write(f"{self.names[number]}/{field}", 0, values)

    # --- loading ----------------------------------------------------------------------------------

    def match(
        self, saved: Mapping[str, FieldSource], values: Mapping[str, Any], differences: Differences
    ) -> dict[str, Any]:
        """Return a `state_dict` with sources in the place of fields. Notes in `differences` what
        does not fit.
        """
        parsed = SavedOptimizer.of(values, saved)
        if parsed.kind != self.kind:
            differences.other("optimizer", f"saved from {parsed.kind}, here it is {self.kind}")
        self._match_groups(parsed.params, differences)
        index = {name: number for number, name in enumerate(self.names)}
        for name, fields in parsed.states.items():
            if name not in index:
                differences.extra.append(f"state of {name}")
            elif self.session is not None:
                self._match_state(name, index[name], fields, differences)
        state = {
            index[name]: self._own_part(index[name], each)
            for name, each in parsed.states.items()
            if name in index
        }
        return {"state": state, "param_groups": self._as_groups(parsed.settings)}

    def _match_groups(self, saved: Sequence[Sequence[str]], differences: Differences) -> None:
        mine = self._group_names
        if len(mine) != len(saved):
            differences.other("param_groups", f"saved {len(saved)}, here there are {len(mine)}")
            return
        for number, (ours, theirs) in enumerate(zip(mine, saved, strict=True)):
            here, there = dict.fromkeys(ours), dict.fromkeys(theirs)
            group = f"of param_groups[{number}]"
            differences.extra += [f"{name} {group}" for name in there if name not in here]
            differences.missing += [f"{name} {group}" for name in here if name not in there]

    def _match_state(
        self, name: str, number: int, state: Mapping[str, Any], differences: Differences
    ) -> None:
        """Compare a saved state with the fields that a wrapped optimizer needs and allows."""
        assert self.session is not None
        needed, allowed = self.session.fields_of(number)
        shape = tuple(self.params[number].shape)
        for field in needed:
            if state.get(field) is None and any(v is not None for v in state.values()):
                differences.missing.append(f"{name}/{field}")
        for field, value in state.items():
            if isinstance(value, FieldSource) and field not in allowed:
                differences.extra.append(f"{name}/{field}")
            elif isinstance(value, FieldSource) and tuple(value.shape) != shape:
                differences.other(
                    f"{name}/{field}", f"saved as {tuple(value.shape)}, here it is {shape}"
                )

    def _own_part(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Reduce the fields of a wrapped optimizer's sharded parameter to the rows here."""
        param, sources = self.params[number], {}
        if self.session is not None and is_sharded(param):
            sources = {key: each for key, each in state.items() if isinstance(each, FieldSource)}
        return state | {key: local_part(source, param) for key, source in sources.items()}

    def _as_groups(self, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups as a `state_dict` has them, with the parameters in this optimizer's
        order and its own settings for `_WAYS`.
        """
        number = count()
        return [
            {
                **saved,
                **{way: own[way] for way in _WAYS if way in own},
                "params": [next(number) for _ in own["params"]],
            }
            for own, saved in zip(self.optimizer.param_groups, settings, strict=False)
        ]

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what the optimizer itself would refuse. Changes nothing."""
        if self.session is not None:
            self.session.check_incoming(state_dict)

    def read(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state into the optimizer. The parameters must have been loaded."""
        if self.session is not None:
            self.optimizer.load_state_dict(dict(state_dict))
            return
        with torch.inference_mode(False):  # later steps change what is made here
            states = _in_memory(state_dict["state"], self.params)
            self.optimizer.load_state_dict({**state_dict, "state": states})
        for number, state in states.items():  # torch has rounded numbers to the parameter's type
            kept = self.optimizer.state[self.params[number]]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 0 and self.params[number].dim():
                    kept[key] = value.to(kept[key].device)


class SavedOptimizer(NamedTuple):
    """An optimizer in a checkpoint: settings and names of parameters by group, and the state of
    each parameter.
    """

    kind: str
    settings: list[dict[str, Any]]
    params: list[list[str]]
    states: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, values: Mapping[str, Any], fields: Mapping[str, Any]) -> SavedOptimizer:
        """Parse the values of an optimizer. fields: what its states have as fields, by name."""
        try:
            groups = values["groups"]
            states = {
                str(name): {str(k): unpacked(v, DTYPES) for k, v in state.items()}
                for name, state in values["states"].items()
            }
            for full, field in fields.items():
                name, _, key = full.rpartition("/")
                states.setdefault(name, {})[key] = field
            return cls(
                str(values["class"]),
                [dict(group["settings"]) for group in groups],
                [[str(name) for name in group["params"]] for group in groups],
                states,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"checkpoint: its optimizer is not as a save writes it ({error!r}), though its "
                "bytes are whole; something else has made it: take another checkpoint"
            ) from error


def _in_memory(
    states: Mapping[int, Mapping[str, Any]], params: Sequence[Tensor]
) -> dict[int, dict[str, Any]]:
    """Read the fields into memory for a plain optimizer. It has no master weights: warns and leaves
    them out.
    """
    if any(MASTER in state for state in states.values()):
        warnings.warn(
            "load: the checkpoint has fp32 masters of 16-bit parameters, which a plain optimizer "
            "cannot keep: they are left out, and moments are rounded; load into a wrapped one "
            "to go on with the same bits",
            stacklevel=2,
        )
    return {
        number: {
            key: _like(value, params[number]) if isinstance(value, FieldSource) else value
            for key, value in state.items()
            if key != MASTER
        }
        for number, state in states.items()
    }


def _like(source: FieldSource, param: Tensor) -> Tensor:
    """Read a field in its parameter's memory order: fused steps go by memory alone."""
    if is_sharded(param) and tuple(source.shape) == tuple(param.shape):
        return like(param, whole(local_part(source, param)))
    if tuple(source.shape) != tuple(param.shape):
        return whole(source)
    found = torch.empty_strided(param.shape, param.stride(), dtype=source.dtype, device="cpu")
    fill(found, source)
    return found


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside the one that accelerate or Lightning made, if there is one."""
    found = inner_optimizer(optimizer)
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    # Lightning's view of a wrapped optimizer is wrapped, too.
    return found._offload_session.optimizer if is_wrapped(found) else found


def _names(
    optimizer: torch.optim.Optimizer, model_names: Mapping[Tensor, str], stateful: Mapping[str, Any]
) -> list[list[str]]:
    """Return the model's names of the parameters, by group; `<group>.<index>` for those of other
    modules.
    """
    taken = set(model_names.values())
    modules = [each for each in stateful.values() if isinstance(each, nn.Module)]
    others = {param for module in modules for param in module.parameters()}
    found: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        found.append([])
        for index, param in enumerate(group["params"]):
            name = model_names.get(param)
            if name is None:
                if param not in others:
                    raise _stranger(group, number, index)
                name = f"{number}.{index}"
                while name in taken:  # the model may have a parameter of that name
                    name = f"#{name}"
            found[-1].append(name)
    return found


def _own_bytes(record: Record, rank_group: RankGroup) -> tuple[Range, ...] | None:
    """Return the bytes of each field of a parameter's state that this rank writes. None: all ranks
    have all of them. Elements of a field have 4 bytes, for any type of parameter.
    """
    own = record.own
    if own is not None and not is_row_major(record.shape, record.stride):
        is_ours = record.number % rank_group.count == rank_group.rank
        own = (0, record.shape.numel() if is_ours else 0)
    return own_bytes(record.name, record.param, own, ELEMENT_BYTES)


def _stranger(group: Mapping[str, Any], number: int, index: int) -> ConfigError:
    param = group["params"][index]
    called = f" ({group['param_names'][index]})" if "param_names" in group else ""
    return ConfigError(
        f"optimizer.param_groups[{number}]['params'][{index}]{called} of shape "
        f"{tuple(param.shape)}: the model's state_dict() does not have it, so that its value would "
        "be lost: put it into the module, or pass its module by name, as loss=loss"
    )
