"""The contents of an optimizer: its groups, and its state by the model's names of the parameters.

A wrapped optimizer delivers its fields chunk by chunk; a plain one has them in memory. Both are
saved alike, so that each can load what the other has saved. Numbers that are not elementwise (step
counts) are in the values, fields in the shards as `<parameter>/<field>`.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.checkpoint.model import Differences
from offload.checkpoint.rank_group import Range, RankGroup, TensorToSave
from offload.checkpoint.tensors import (
    Sink,
    holding_of,
    local_part,
    order_of,
    sample,
    whole,
    write,
)
from offload.checkpoint.trees import packed, unpacked
from offload.core.errors import ConfigError, FormatError
from offload.distributed import is_sharded, like, local_of, rows_of
from offload.optim import Session, is_wrapped
from offload.optim.assembly import is_row_major
from offload.optim.export import ParamOptimizerState
from offload.optim.flat import flat
from offload.optim.optimizer import session_of
from offload.optim.recipe import Record
from offload.optim.saver import Saver
from offload.optim.source import FieldPart, FieldSource, as_bytes, own_range
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
        self.session: Session | None = (
            session_of(self.optimizer) if is_wrapped(self.optimizer) else None
        )
        self.params: list[Tensor] = [
            param for group in self.optimizer.param_groups for param in group["params"]
        ]
        self.names = _names(self.optimizer, model_names, stateful or {})
        self.held: list[ParamOptimizerState] = []
        self._strided = StridedState([])
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
                specs = [TensorSpec(f"{name}/{field}", "F32", shape) for field in held.fields]
                found += [
                    TensorToSave(spec, own_bytes(held.record, spec, rank_group)) for spec in specs
                ]
                states[name] = {key: packed(value) for key, value in held.scalars.items()}
        else:
            states = self._look_at_plain()
            found = [holding_of(name, tensor) for name, tensor in self._fields.items()]
            found.sort(key=lambda each: -SIZES[each.spec.dtype])
        return found, {
            "class": self.kind,
            "groups": self._groups(),
            "states": states,
            "orders": self._orders(),
        }

    def _orders(self) -> dict[str, list[int]]:
        """Return the memory order of each parameter that is not in the order of its shape."""
        found = {name: order_of(p) for name, p in zip(self.names, self.params, strict=True)}
        return {name: order for name, order in found.items() if order is not None}

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

    def samples(self) -> dict[str, str]:
        """Return sample checksums of the fields that all ranks should have the same of."""
        fields = {name: each for name, each in self._fields.items() if not is_sharded(each)}
        return {name: f"{sample(tensor):08x}" for name, tensor in fields.items()}

    def begin_saving(self, sink: Sink) -> Saver | None:
        """Write the fields of a plain optimizer, which are in memory, to the sink. Begin a snapshot
        of those of a wrapped one, which the sink receives later.
        """
        if self.session is None:
            for name, tensor in self._fields.items():
                write(name, tensor, sink)
            return None
        first = [first_byte(param) for param in self.params]
        strided = self._strided = StridedState(self.held)

        def put(number: int, field: str, begin: int, values: Tensor) -> None:
            if strided.takes(number, field):
                strided.add(number, field, begin, values)
            else:
                sink.write(f"{self.names[number]}/{field}", first[number] + begin, values)

        return self.session.begin_saving(put)

    def write_strided(self, rank_group: RankGroup, sink: Sink) -> None:
        """Write what the ranks must put together first. Blocks until all have called it."""
        for number, field, values in self._strided.gathered(rank_group):
            sink.write(f"{self.names[number]}/{field}", 0, values)

    # --- loading ----------------------------------------------------------------------------------

    def match(
        self, saved: Mapping[str, FieldSource], values: Mapping[str, Any], differences: Differences
    ) -> dict[str, Any]:
        """Return a `state_dict` with sources in the place of fields. Notes in `differences` what
        does not fit.
        """
        parsed = SavedOptimizer.of(values)
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
            group = f"of param_groups[{number}]"
            differences.extra += [f"{name} {group}" for name in there if name not in here]
            differences.missing += [f"{name} {group}" for name in here if name not in there]

    def _match_fields(
        self,
        found: Mapping[str, dict[str, Any]],
        index: Mapping[str, int],
        differences: Differences,
    ) -> None:
        for name, state in found.items():
            if name not in index:
                differences.extra.append(f"state of {name}")
            elif self.session is not None:
                self._match_state(name, index[name], state, differences)

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

    def _as_groups(self, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups as a `state_dict` has them, with the parameters in this optimizer's
        order and its own settings for `_WAYS`.
        """
        found, begin = [], 0
        for own, saved in zip(self.optimizer.param_groups, settings, strict=False):
            end = begin + len(own["params"])
            ways = {way: own[way] for way in _WAYS if way in own}
            found.append({**saved, **ways, "params": list(range(begin, end))})
            begin = end
        return found

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what the optimizer itself would refuse. Changes nothing."""
        if self.session is not None:
            self.session.check_incoming(self._own_parts(state_dict))

    def read(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state into the optimizer. The parameters must have been loaded."""
        if self.session is not None:
            self.optimizer.load_state_dict(self._own_parts(state_dict))
            return
        with torch.inference_mode(False):  # later steps change what is made here
            states = _in_memory(state_dict["state"], self.params)
            self.optimizer.load_state_dict({**state_dict, "state": states})
        for number, state in states.items():  # torch has rounded numbers to the parameter's type
            kept = self.optimizer.state[self.params[number]]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 0 and self.params[number].dim():
                    kept[key] = value.to(kept[key].device)

    def _own_parts(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Reduce the fields of sharded parameters to the rows that this rank holds."""
        states = {
            number: {
                key: local_part(value, self.params[number])
                if isinstance(value, FieldSource)
                else value
                for key, value in state.items()
            }
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}


class StridedState:
    """State of parameters whose memory is in another order than their shape, where ranks share it.

    A rank's part is one run of the memory, and is scattered over the tensor that is saved. So each
    field is gathered, and one rank, another for each parameter, writes all of it; one field at a
    time.
    """

    def __init__(self, held: Iterable[ParamOptimizerState]) -> None:
        self._records = {
            (each.record.number, field): each.record
            for each in held
            if is_strided(each.record)
            for field in each.fields
        }
        self._parts: dict[tuple[int, str], FieldPart] = {}
        self._lock = threading.Lock()

    def takes(self, number: int, field: str) -> bool:
        return (number, field) in self._records

    def add(self, number: int, field: str, begin_bytes: int, values: Tensor) -> None:
        """Copy some of this rank's elements, by their places in the parameter's memory. Any thread
        may call it.
        """
        with self._lock:
            part = self._part(number, field)
        part.write(begin_bytes // ELEMENT_BYTES, values)

    def _part(self, number: int, field: str) -> FieldPart:
        if (number, field) not in self._parts:
            own = own_range(self._records[number, field])
            self._parts[number, field] = FieldPart.empty(*own)
        return self._parts[number, field]

    def gathered(self, rank_group: RankGroup) -> Iterator[tuple[int, str, Tensor]]:
        """Gather each field; yield those that this rank writes. Every rank must take all of them;
        each blocks until all ranks have come to it.
        """
        for (number, field), record in self._records.items():
            mine = self._part(number, field)
            del self._parts[number, field]
            parts = rank_group.bring_together(as_bytes(mine.values))
            if number % rank_group.count == rank_group.rank:
                whole = torch.empty_strided(
                    record.shape, record.stride, dtype=torch.float32, device="cpu"
                )
                as_bytes(flat(whole)).copy_(torch.cat(parts))
                yield number, field, whole.contiguous().view(-1)


def is_strided(record: Record) -> bool:
    return record.own is not None and not is_row_major(record.shape, record.stride)


class SavedOptimizer(NamedTuple):
    """The values of an optimizer in a checkpoint: settings and names of parameters by group, and
    the part of each parameter's state that is not elementwise.
    """

    kind: str
    settings: list[dict[str, Any]]
    params: list[list[str]]
    states: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SavedOptimizer:
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
    found = whole(source)
    if found.shape != param.shape or found.stride() == param.stride():
        return found
    there = torch.empty_strided(param.shape, param.stride(), dtype=found.dtype, device="cpu")
    return there.copy_(found)


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside the one that accelerate or Lightning made, if there is one."""
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
    # Lightning's view of a wrapped optimizer is wrapped, too.
    return session_of(found).optimizer if is_wrapped(found) else found


def _names(
    optimizer: torch.optim.Optimizer, model_names: Mapping[Tensor, str], stateful: Mapping[str, Any]
) -> list[str]:
    """Return the model's names of the parameters; `<group>.<index>` for those of other modules."""
    taken = set(model_names.values())
    modules = [each for each in stateful.values() if isinstance(each, nn.Module)]
    others = {param for module in modules for param in module.parameters()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            name = model_names.get(param)
            if name is None:
                if param not in others:
                    raise _stranger(group, number, index)
                name = f"{number}.{index}"
                while name in taken:  # the model may have a parameter of that name
                    name = f"#{name}"
            found.append(name)
    return found


def own_bytes(record: Record, spec: TensorSpec, rank_group: RankGroup) -> tuple[Range, ...] | None:
    """Return the bytes of each field of a parameter's state that this rank writes. None: all ranks
    have all of them. Elements of a field have 4 bytes, for any type of parameter.
    """
    if is_sharded(record.param):
        rows = rows_of(record.name, record.param)
        begin, numel = first_byte(record.param), local_of(record.param).numel()
        return ((begin, begin + numel * ELEMENT_BYTES),) if rows.is_first_holder else ()
    own = record.own
    if own is None:
        return None
    if is_strided(record):
        return ((0, spec.nbytes),) if record.number % rank_group.count == rank_group.rank else ()
    return ((own[0] * ELEMENT_BYTES, own[1] * ELEMENT_BYTES),)


def first_byte(param: Tensor) -> int:
    """Return the offset in bytes, in a whole field, of the first element that this rank holds."""
    if not is_sharded(param):
        return 0
    return rows_of("", param).begin * math.prod(param.shape[1:]) * ELEMENT_BYTES


def _stranger(group: Mapping[str, Any], number: int, index: int) -> ConfigError:
    param = group["params"][index]
    called = f" ({group['param_names'][index]})" if "param_names" in group else ""
    return ConfigError(
        f"optimizer.param_groups[{number}]['params'][{index}]{called} of shape "
        f"{tuple(param.shape)}: the model's state_dict() does not have it, so that its value would "
        "be lost: put it into the module, or pass its module by name, as loss=loss"
    )
