"""The choice of an optimizer's recipe, the recipe for optimizers without a native kernel, and the
optimizers that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.kernels.reference import take_over
from offload.optim.lion import Lion
from offload.optim.recipe import (
    AdagradRecipe,
    AdamRecipe,
    Group,
    LionRecipe,
    Recipe,
    Record,
    SgdRecipe,
    SliceUpdate,
)
from offload.planning.layout import MASTER

_SUITABLE = "take one that treats every element by itself, such as AdamW or offload.Lion"
_GENERIC = ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
_REFUSED = {
    "LBFGS": "it keeps a history over all parameters",
    "Adafactor": "it factors second moments over rows and columns",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients",
}
# Packages whose steps work on blocks of quantised numbers, or with kernels for GPUs only.
_REFUSED_PACKAGES = ("bitsandbytes", "torchao")
_PROBE_NUMEL = 24
_NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr")


def choose_recipe(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> Recipe:
    """Choose the recipe for exactly this class: a subclass may do something else in its `step`.
    elementwise: True if the user declares that the step treats every element by itself; None if
    the caller (prepare) has no such argument.
    """
    kind = type(optimizer)
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError("optimizer: differentiable=True cannot be offloaded; set it to False")
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not amsgrad:
        return AdamRecipe(decoupled=kind is torch.optim.AdamW)
    if kind is torch.optim.SGD:
        return SgdRecipe()
    if kind is torch.optim.Adagrad:
        return AdagradRecipe()
    if kind is Lion:
        return LionRecipe()
    name = kind.__name__
    if name in _REFUSED:  # by name, whichever package defines the class
        raise ConfigError(f"optimizer: {name} cannot be offloaded: {_REFUSED[name]}; {_SUITABLE}")
    package = kind.__module__.partition(".")[0]
    if package in _REFUSED_PACKAGES:
        raise ConfigError(
            f"optimizer: {kind.__module__}.{name} cannot be offloaded: {package} updates blocks of "
            "a parameter, or of its quantised state, on the device; take torch.optim.AdamW, whose "
            "state is then kept outside of the device in full precision"
        )
    known = kind.__module__.startswith("torch.optim") and (name in _GENERIC or amsgrad)
    if known or elementwise:
        return GenericRecipe(kind, optimizer)
    raise ConfigError(f"optimizer: {kind.__module__}.{name} is not known; {_opt_in(elementwise)}")


def _opt_in(elementwise: bool | None) -> str:
    said = "if its step treats every element of a parameter by itself"
    if elementwise is None:
        return (
            f"for prepare, {_SUITABLE}; {said}, offload.wrap(optimizer, elementwise=True) moves "
            "its state alone, without the model"
        )
    return f"{said}, say elementwise=True; else {_SUITABLE}"


class GenericRecipe(Recipe):
    """The recipe for optimizers that have no native kernel: the torch class itself, slice by slice.

    It works for every optimizer whose step treats each element by itself. Which state is
    elementwise and which is a scalar of the whole parameter (a step count, NAdam's product) is
    found by running the class once on a small parameter. Each slice of a parameter starts from the
    same scalars and must end with the same ones.
    """

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
                name
                for name, value in state.items()
                if isinstance(value, Tensor) and value.numel() == _PROBE_NUMEL
            )
        return self._fields[key]

    def update(self, work: SliceUpdate) -> None:
        record = work.record
        if work.out is not None:
            take_over(work.master, work.out)  # as the kernels do
        param = torch.nn.Parameter(work.master, requires_grad=True)
        grad = work.grad.float()
        param.grad = grad if work.scale == 1.0 else grad * work.scale
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

    def end_step(self, records: Sequence[Record]) -> None:
        for record in records:
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


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(one[k] == other[k]) for k in one)
