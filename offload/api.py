"""The calls that users make."""

from __future__ import annotations

from typing import Any

import torch

from offload.budget import HOST
from offload.config import Config
from offload.errors import ConfigError
from offload.hooks import watch_gradients
from offload.machine import free_memory_bytes, read_memory
from offload.optim import OffloadOptimizer, Session, attach, choose_recipe, is_wrapped
from offload.optim.session import make_records, spec_of
from offload.planner import Plan, make_plan
from offload.reports import Report

_LEAVE_SHARE, _LEAVE_BYTES = 0.2, 8 << 30  # of the machine, for everybody else


def wrap(
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    *,
    elementwise: bool = False,
    **fields: Any,
) -> Any:
    """Move the optimizer's state to host memory and NVMe, within `host_memory` bytes. The same
    object comes back, and the loop around it stays as it is.

    elementwise: an optimizer of your own treats each element of a parameter by itself. fields:
    those of `Config`.
    """
    config = Config.of(config, **fields)
    _check_wrappable(optimizer)
    _refuse_unbuilt(config)
    recipe = choose_recipe(optimizer, elementwise)
    strangers = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if strangers:
        raise ConfigError(
            f"optimizer.state: has {strangers[0]!r}, which belongs to no parameter and could not "
            "be kept; only the state of parameters can be offloaded"
        )
    _set_limit(config)
    session = Session(optimizer, recipe, config, _host_budget(config), watch_gradients)
    try:
        numbers = {record.param: record.number for record in session.updater.records}
        states = {numbers[p]: state for p, state in optimizer.state.items() if p in numbers}
        session.updater.check_states(states)
        session.updater.take_in(states)
    except BaseException:
        session.close()
        raise
    attach(optimizer, session)
    return optimizer


def plan(
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    *,
    elementwise: bool = False,
    **fields: Any,
) -> Plan:
    """What `wrap` with the same arguments would do. Nothing is allocated."""
    config = Config.of(config, **fields)
    _check_wrappable(optimizer)
    records = make_records(optimizer, choose_recipe(optimizer, elementwise), optimizer.state)
    return make_plan(
        [spec_of(r) for r in records],
        _host_budget(config),
        bool(config.nvme),
        needs_homes=config.release_grads,
    )


def report(optimizer: Any) -> Report:
    """What a wrapped optimizer has done: bytes, seconds by cause, fall-backs."""
    if not is_wrapped(optimizer):
        raise ConfigError(f"report: expected a wrapped optimizer, got {type(optimizer).__name__}")
    session: Session = optimizer._offload_session
    total, last = session.metrics.snapshot(), session.last_step
    return Report(
        plan=session.plan,
        counts=dict(total.counts),
        seconds=dict(total.seconds),
        last_seconds=dict(last.seconds) if last else {},
        fallbacks=dict(total.fallbacks),
        disk_engine=session.store.stats().engine if session.store else None,
        disk_bytes=session.disk_bytes(),
        last_disk_bytes=session.last_disk_bytes,
        host_peak_bytes=session.pool.stats().peak_bytes if session.pool else 0,
    )


def _check_wrappable(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, OffloadOptimizer):
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
    for name in (
        "device_memory",
        "param_dtype",
        "state_dtype",
        "activations",
        "prefetch_depth",
        "process_group",
        "profile",
    ):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{name}: not built yet for wrap; leave it out")


def _set_limit(config: Config) -> None:
    """One limit for the process. That of earlier users has ended when they have gone."""
    if config.host_memory is not None or HOST.used_bytes == 0:
        HOST.limit(None if config.host_memory is None else int(config.host_memory))


def _host_budget(config: Config) -> int | None:
    """Host bytes for this optimizer: what was asked for, or what leaves the machine enough."""
    if config.host_memory is not None:
        return max(0, int(config.host_memory) - HOST.used_bytes)
    memory = read_memory()
    free = free_memory_bytes(memory)
    if free is None or memory.total_bytes is None:
        return None
    total = min(memory.total_bytes, memory.cgroup_limit_bytes or memory.total_bytes)
    return max(0, free - max(int(total * _LEAVE_SHARE), _LEAVE_BYTES))
