"""What is asked of `wrap` or `plan`, checked: both refuse the same, before anything is changed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.budget import HOST
from offload.config import Config, format_size
from offload.errors import CapacityError, ConfigError
from offload.machine import free_memory_bytes, read_memory
from offload.optim.choose import choose_recipe
from offload.optim.incoming import check_states
from offload.optim.optimizer import is_wrapped
from offload.optim.probe import measure
from offload.optim.recipe import NativeRecipe, Recipe
from offload.optim.records import make_records, spec_of
from offload.optim.session import check_homes
from offload.planner import Plan, make_plan

_LEAVE_SHARE, _LEAVE_BYTES = 0.2, 8 << 30  # of the machine, for everybody else
_UNBUILT = (
    "device_memory",
    "param_dtype",
    "state_dtype",
    "activations",
    "prefetch_depth",
    "process_group",
    "profile",
)


@dataclass(frozen=True)
class Request:
    """One that can be met, as far as can be said without trying."""

    recipe: Recipe
    plan: Plan
    states: Mapping[int, Mapping[str, Any]]  # what the optimizer has already, by number
    host_bytes: int | None  # that it may take; None: no limit

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer, config: Config, elementwise: bool, measured: bool = False
    ) -> Request:
        """Refuses what cannot work. Changes nothing. measured: with speeds, which takes time."""
        _check_wrappable(optimizer)
        _refuse_unbuilt(config)
        _check_device(optimizer, config)
        _check_directories(config)
        recipe = choose_recipe(optimizer, elementwise)
        _refuse_strangers(optimizer)
        records = make_records(optimizer, recipe, optimizer.state)
        specs = [spec_of(record) for record in records]
        numbers = {record.param: record.number for record in records}
        states = {numbers[p]: state for p, state in optimizer.state.items() if p in numbers}
        check_states(records, recipe, states)
        host_bytes, held_bytes = _host_bytes(config)
        with _telling_of_the_budget(config):
            plan = make_plan(
                specs,
                host_bytes,
                has_disk=bool(config.nvme),
                needs_homes=config.release_grads,
                held_bytes=held_bytes,
            )
        check_homes(config, plan)
        if measured:
            directories = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
            speeds = measure(plan, directories, isinstance(recipe, NativeRecipe))
            plan = replace(plan, speeds=speeds)
        return Request(recipe, plan, states, host_bytes)


def _check_wrappable(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if is_wrapped(optimizer):
        raise ConfigError("optimizer: is wrapped already; close() it first")
    held = getattr(optimizer, "optimizer", None)
    if isinstance(held, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} holds another one, {type(held).__name__}; wrap "
            "that one, before it is handed over"
        )


def _refuse_unbuilt(config: Config) -> None:
    """A field that does nothing yet is an error, not a silence."""
    default = Config()
    for name in _UNBUILT:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{name}: not built yet for wrap; leave it out")


def _check_device(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """`wrap` leaves parameters where they are; a device that is named must be that one."""
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


def _check_directories(config: Config) -> None:
    """Also where everything fits in memory today: another plan, later, may need them."""
    for path in config.nvme or ():  # type: ignore[union-attr]
        directory = Path(path)
        if not directory.is_dir():
            raise ConfigError(f"nvme: {directory} is not a directory; make it, or give another")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"nvme: {directory} cannot be written to; allow it, or give another")


def _refuse_strangers(optimizer: torch.optim.Optimizer) -> None:
    strangers = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if strangers:
        raise ConfigError(
            f"optimizer.state: has {strangers[0]!r}, which belongs to no parameter and could not "
            "be kept; only the state of parameters can be offloaded"
        )


@contextmanager
def _telling_of_the_budget(config: Config) -> Iterator[None]:
    """Whoever gave no `host_memory` is told where the number in a refusal comes from."""
    try:
        yield
    except CapacityError as error:
        if config.host_memory is not None:
            raise
        raise CapacityError(
            f"{error} (host_memory was not given: then it is what is left of an earlier limit, or "
            f"what is free now less {_LEAVE_SHARE:.0%} of the machine or "
            f"{format_size(_LEAVE_BYTES)})"
        ) from error


def _host_bytes(config: Config) -> tuple[int | None, int]:
    """Host bytes for this optimizer: what was asked for, or what is left of the limit that stands,
    or what leaves the machine enough. And what others hold already.
    """
    if HOST.used_bytes:
        gc.collect()  # what holds itself and nobody else, a trainer say, may hold some of it
    held, limit = HOST.used_bytes, config.host_memory
    if limit is None and held:
        limit = HOST.limit_bytes
    if limit is not None:
        return max(0, int(limit) - held), held
    memory = read_memory()
    free = free_memory_bytes(memory)
    if free is None or memory.total_bytes is None:
        return None, 0
    total = min(memory.total_bytes, memory.cgroup_limit_bytes or memory.total_bytes)
    return max(0, free - max(int(total * _LEAVE_SHARE), _LEAVE_BYTES)), 0
