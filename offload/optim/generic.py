"""The recipe for optimizers that have no native kernel: the torch class itself, slice by slice.

It works for every optimizer whose step treats each element by itself. Which state is elementwise
and which is a scalar of the whole parameter (a step count, NAdam's product) is found by running the
class once on a small parameter. Each slice of a parameter starts from the same scalars and must end
with the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.optim.recipe import Group, Record, SliceUpdate
from offload.planning.layout import MASTER

_PROBE_NUMEL = 24
_NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr")


class GenericRecipe:
    def __init__(self, base: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> None:
        self._base = base
        self._inner = _bare_copy(base, optimizer)
        self._fields: dict[str, tuple[str, ...]] = {}
        self._next: dict[int, dict[str, Any]] = {}  # scalars after this step, by record number

    def begin_step(self, records: Sequence[Record]) -> None:
        self._next.clear()

    def fields(self, group: Group) -> tuple[str, ...]:
        """Find the elementwise state by one step on a small parameter made for that. The result is
        cached by the group's settings.
        """
        key = repr(sorted((k, repr(v)) for k, v in group.items() if k not in _NOT_SETTINGS))
        if key not in self._fields:
            probe = torch.nn.Parameter(torch.ones(_PROBE_NUMEL, dtype=torch.float32, device="cpu"))
            probe.grad = torch.ones(_PROBE_NUMEL, dtype=torch.float32, device="cpu")
            state = self._run(probe, group, {})
            self._fields[key] = tuple(
                name for name, value in state.items() if _is_elementwise(value, _PROBE_NUMEL)
            )
        return self._fields[key]

    def initial(self, record: Record, field: str) -> float:
        return 0.0  # the class itself makes new state

    def check_scalars(self, record: Record, state: Mapping[str, Any]) -> None:
        return None

    def update(self, work: SliceUpdate) -> None:
        record = work.record
        _adopt(work)
        param = torch.nn.Parameter(work.master, requires_grad=True)
        param.grad = _scaled(work.grad, work.scale)
        fresh = record.step == 1.0
        before = {} if fresh else {**deepcopy(record.scalars), **work.states}
        after = self._run(param, record.group, before)
        for name, view in work.states.items():
            value = after.pop(name)
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
        self._keep_scalars(record, after)
        if work.out is not None:
            work.out.copy_(work.master)

    def _run(
        self, param: torch.nn.Parameter, group: Group, state: dict[str, Any]
    ) -> dict[str, Any]:
        settings = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        if "foreach" in settings:
            settings["foreach"] = False  # it has one tensor: no gain in time, a cost in memory
        self._inner.param_groups = [{**settings, "params": [param]}]
        self._inner.state.clear()
        if state:
            self._inner.state[param] = state
        before = self._aside()
        self._base.step(self._inner)
        result = dict(self._inner.state.pop(param, {}))
        if self._inner.state or self._aside() != before:
            raise ConfigError(
                f"{self._base.__name__}: its step keeps something in the optimizer or its groups "
                "beside the state of parameters (a count, say), which is lost when it runs slice "
                "by slice; keep it in the state of each parameter"
            )
        self._inner.param_groups = [{**settings, "params": []}]  # do not hold the slice's memory
        return result

    def _aside(self) -> str:
        """Describe what a step may change beside parameters and their state, for a comparison."""
        group = {k: v for k, v in self._inner.param_groups[0].items() if k != "params"}
        own = {k: v for k, v in vars(self._inner).items() if k not in ("param_groups", "state")}
        return repr((group, own))

    def _keep_scalars(self, record: Record, scalars: dict[str, Any]) -> None:
        """Keep the scalars after the step; they must be the same for every slice of a parameter."""
        known = self._next.setdefault(record.number, scalars)
        if known is not scalars and not _same(known, scalars):
            raise ConfigError(
                f"{self._base.__name__}: slices of {record.name} end with different numbers; its "
                "step is not elementwise"
            )

    def end_step(self, record: Record) -> None:
        if record.number in self._next:
            record.scalars = self._next.pop(record.number)

    def scalar_state(self, record: Record) -> dict[str, Any]:
        return deepcopy(record.scalars)

    def take_scalars(self, record: Record, state: Mapping[str, Any]) -> None:
        record.scalars = {
            name: deepcopy(value)
            for name, value in state.items()
            if name not in (*record.fields, MASTER)
        }
        record.step = max(1.0, float(state.get("step", 1.0)))


def _bare_copy(
    base: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """Make an optimizer of the same class and settings, without the user's parameters or hooks."""
    bare = base.__new__(base)
    torch.optim.Optimizer.__init__(
        bare,
        [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))],
        dict(optimizer.defaults),
    )
    kept = set(vars(bare)) | {"step"}
    vars(bare).update({k: v for k, v in vars(optimizer).items() if k not in kept})
    return bare


def _adopt(work: SliceUpdate) -> None:
    """Take over 16-bit parameter values that user code has set: where they differ from the rounded
    master, they replace it. Native kernels do the same.
    """
    if work.out is not None:
        other = work.master.to(work.out.dtype).view(torch.int16) != work.out.view(torch.int16)
        work.master.copy_(torch.where(other, work.out.float(), work.master))


def _is_elementwise(value: object, numel: int) -> bool:
    return isinstance(value, Tensor) and value.numel() == numel


def _scaled(grad: Tensor, scale: float) -> Tensor:
    full = grad.float()
    return full if scale == 1.0 else full * scale


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(one[k] == other[k]) for k in one)
