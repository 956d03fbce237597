"""The checked arguments of `wrap` or `plan`: both refuse the same, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.core.config import Config
from offload.core.errors import ConfigError
from offload.optim.buckets import no_buckets, place_of, share_out, stage_of
from offload.optim.choose import choose_recipe
from offload.optim.incoming import check_states
from offload.optim.optimizer import is_wrapped
from offload.optim.probe import measure
from offload.optim.recipe import NativeRecipe, Recipe, Record
from offload.optim.records import make_records, spec_of
from offload.optim.session import check_grad_buffers
from offload.planning.limits import (
    check_directories,
    host_bytes,
    refuse_unbuilt,
    telling_of_the_budget,
)
from offload.planning.planner import Plan, make_plan
from offload.planning.tuning import ChosenTuning, choose

_UNBUILT = (
    "device_memory",
    "param_dtype",
    "state_dtype",
    "activations",
    "prefetch_depth",
)


@dataclass(frozen=True)
class WrapRequest:
    """A request to wrap an optimizer that can be met, as far as can be said without trying."""

    recipe: Recipe
    plan: Plan
    states: Mapping[int, Mapping[str, Any]]  # that the optimizer has already, by record number
    host_bytes: int | None  # that it may take; None: no limit
    chosen: ChosenTuning

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer,
        config: Config,
        elementwise: bool,
        measured: bool = False,
        place: tuple[int, int] | None = None,
    ) -> WrapRequest:
        """Check the arguments and make the plan; raise where it cannot work. Changes nothing.
        measured: with measured speeds, which takes time. place: rank and count of the ranks that
        share the state.
        """
        check_wrappable(optimizer)
        refuse_unbuilt(config, _UNBUILT, "wrap")
        _check_device(optimizer, config)
        check_directories(config)
        recipe = choose_recipe(optimizer, elementwise)
        _refuse_strangers(optimizer)
        records = make_records(optimizer, recipe, optimizer.state)
        buckets = place and share_out(no_buckets(place, config), records)
        specs = [spec_of(record) for record in records]
        states = states_of(optimizer, records, recipe)
        allowed_bytes, held_bytes = host_bytes(config)
        params = [record.param for record in records]
        device = params[0].device.type if params else "cpu"
        chosen = choose(config, params, device, place is not None).in_force(config, True)
        with telling_of_the_budget(config):
            plan = make_plan(
                specs,
                allowed_bytes,
                has_disk=bool(config.nvme),
                needs_grad_buffers=config.release_grads,
                held_bytes=held_bytes,
                ranks=buckets.share(stage_of(config), place_of(records)) if buckets else None,
                disk_chunk_numel=chosen.tuning.chunk_numel,
            )
        _refuse_release(config, records)
        check_grad_buffers(config, plan)
        if measured:
            directories = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
            speeds = measure(plan, directories, isinstance(recipe, NativeRecipe))
            plan = replace(plan, speeds=speeds)
        return WrapRequest(recipe, plan, states, allowed_bytes, chosen)


def states_of(
    optimizer: torch.optim.Optimizer, records: Sequence[Record], recipe: Recipe
) -> dict[int, dict[str, Any]]:
    """Return the state that a plain optimizer has already, by record number; raise where it does
    not fit.
    """
    numbers = {record.param: record.number for record in records}
    states = {numbers[p]: state for p, state in optimizer.state.items() if p in numbers}
    check_states(records, recipe, states)
    return states


def check_wrappable(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if is_wrapped(optimizer):
        raise ConfigError("optimizer: is wrapped already; close() it first")
    held = getattr(optimizer, "optimizer", None)
    if isinstance(held, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} holds another one, {type(held).__name__}; give "
            "that one, before it is handed over"
        )


def _check_device(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Raise where a parameter is not on the device that the config names: `wrap` leaves parameters
    where they are.
    """
    if config.device == "auto":
        return
    wanted = torch.device(config.device)
    for group in optimizer.param_groups:
        for param in group["params"]:
            same = param.device.type == wanted.type and wanted.index in (None, param.device.index)
            if not same:
                raise ConfigError(
                    f"device: {wanted} was given, but a parameter {tuple(param.shape)} is on "
                    f"{param.device}, and wrap leaves parameters where they are; move the model "
                    "first, or leave device out"
                )


def _refuse_release(config: Config, records: Sequence[Record]) -> None:
    sharded = [record.name for record in records if record.placing is not None]
    if config.release_grads and sharded:
        raise ConfigError(
            f"release_grads: {sharded[0]} is a DTensor, whose gradients are FSDP2's own business; "
            "leave it out (fully_shard has a CPUOffloadPolicy)"
        )


def _refuse_strangers(optimizer: torch.optim.Optimizer) -> None:
    strangers = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if strangers:
        raise ConfigError(
            f"optimizer.state: has {strangers[0]!r}, which belongs to no parameter and could not "
            "be kept; only the state of parameters can be offloaded"
        )
