"""The records of an optimizer's parameters, in the order of its groups: which of them get state,
which the update cannot handle, and what the plan of all needs to know.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from offload.core.config import Config
from offload.core.errors import ConfigError
from offload.core.tensors import is_dense
from offload.distributed.group import world_size
from offload.optim.buckets import Buckets
from offload.optim.recipe import Recipe, Record
from offload.planning.layout import MASTER, ParamSpec
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.state_plan import UNKNOWN, Plan, RankShare, Speeds
from offload.planning.tuning import ChosenTuning

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
States = Mapping[int, Mapping[str, Any]]  # as a plain optimizer has them, by record number


@dataclass(frozen=True)
class OptimizerDraft:
    """A set of records, plan and buckets that is drawn up and not opened yet. budgets: for later
    plans, too. states: that the optimizer has already, by record number.
    """

    recipe: Recipe
    records: list[Record]
    plan: Plan
    budgets: Budgets
    chosen: ChosenTuning
    buckets: Buckets | None = None  # None: nothing is shared with other ranks
    states: States = field(default_factory=dict)


def make_records(
    optimizer: torch.optim.Optimizer, recipe: Recipe, with_state: Container[Tensor]
) -> list[Record]:
    """Make one record for each parameter. A frozen parameter gets no state, unless it has state or
    a gradient already.
    """
    params = [param for param, _, _ in each_param(optimizer)]
    if len(set(params)) < len(params):
        raise ConfigError("optimizer: a parameter is given twice; give each once")
    return [
        Record(
            number,
            name,
            param,
            group,
            recipe.fields(group),
            is_frozen=not param.requires_grad and param.grad is None and param not in with_state,
        )
        for number, (param, group, name) in enumerate(each_param(optimizer))
    ]


def each_param(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[Tensor, dict[str, Any], str]]:
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if is_lazy(param):
                raise ConfigError(
                    f"group {index} param {i}: is lazy and has no shape yet; run one batch through "
                    "the model first"
                )
        names = group.get("param_names") or [
            f"group {index} param {i} {tuple(p.shape)}" for i, p in enumerate(group["params"])
        ]
        found += [(p, group, name) for p, name in zip(group["params"], names, strict=True)]
    return found


def facts_of(
    records: Sequence[Record],
    config: Config,
    share: RankShare | None = None,
    speeds: Speeds = UNKNOWN,
) -> TrainingFacts:
    """Gather the facts that the plan of these records depends on. share: what ranks share."""
    return TrainingFacts(tuple(map(spec_of, records)), bool(config.release_grads), share, speeds)


def check_grad_buffers(config: Config, plan: Plan) -> None:
    is_alone = not plan.has_grad_buffers and plan.ranks is None
    if config.release_grads and is_alone and not world_size():
        # A program for several ranks may be started with a single one, which has none to share
        # with.
        raise ConfigError(
            "release_grads: all parameters are in host memory, where their gradients are used in "
            "place; leave it out"
        )


def spec_of(record: Record) -> ParamSpec:
    """Return what the layout needs to know of a parameter; refuse one that the update cannot
    handle.
    """
    check_param(record.name, record.local, may_be_meta=record.unit is not None)
    if record.placing is not None and record.placing.is_partial:
        raise ConfigError(
            f"{record.name}: expected a parameter of which each rank has its own elements, got "
            f"{record.placing}; redistribute() it"
        )
    if record.is_frozen:
        return ParamSpec(record.name, record.local.numel(), ())  # the update never touches it
    fields = ((MASTER,) if record.is_half else ()) + record.fields
    device_bytes = record.device_bytes if record.unit is None else 0  # a prepared model fetches it
    # Foreach operations, which clipping uses, do not advance the version counter of a DTensor.
    late = record.placing is not None
    numel = record.local.numel()
    return ParamSpec(record.name, numel, fields, device_bytes, record.unit, record.own, late)


def check_param(name: str, param: Tensor, may_be_meta: bool = False) -> None:
    """Refuse a parameter that the update cannot handle. may_be_meta: it may be on the meta device,
    since the engine fills it later.
    """
    if param.dtype not in DTYPES:
        raise ConfigError(
            f"{name}: expected a parameter of float32, bfloat16 or float16, got {param.dtype}"
        )
    if param.is_meta and not may_be_meta:
        raise ConfigError(f"{name}: is on the meta device and has no values; fill it first")
    if param.layout != torch.strided or not is_dense(param):
        raise ConfigError(
            f"{name}: expected a parameter whose elements lie next to one another, got shape "
            f"{tuple(param.shape)} with strides {param.stride()}; make it contiguous"
        )
