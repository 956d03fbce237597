"""The calls that users make."""

from __future__ import annotations

from typing import Any

import torch

from offload.budget import HOST
from offload.config import Config
from offload.errors import ConfigError
from offload.hooks import watch_gradients
from offload.optim import Request, Session, attach, is_wrapped
from offload.planner import Plan
from offload.reports import Report


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
    request = Request.of(optimizer, config, elementwise)
    before = HOST.limit_bytes
    _set_limit(config)
    try:
        session = Session(optimizer, request.recipe, config, request.host_bytes, watch_gradients)
        try:
            session.updater.take_in(request.states)
        except BaseException:
            session.close()
            raise
    except BaseException:
        HOST.put_back_limit(before)
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
    """What `wrap` with the same arguments would do, and the same refusals. Nothing is allocated."""
    return Request.of(optimizer, Config.of(config, **fields), elementwise).plan


def report(optimizer: Any) -> Report:
    """What a wrapped optimizer has done: bytes, seconds by cause, fall-backs."""
    session: Session = _wrapped_one(optimizer)._offload_session
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


def _wrapped_one(optimizer: Any) -> Any:
    """The optimizer itself, or the one that it holds, as accelerate's and Lightning's do."""
    found = optimizer
    while not is_wrapped(found):
        outer, found = found, getattr(found, "optimizer", None)
        if found is outer or not isinstance(found, torch.optim.Optimizer):
            raise ConfigError(
                f"report: expected a wrapped optimizer, got {type(optimizer).__name__}"
            )
    return found


def _set_limit(config: Config) -> None:
    """One limit for the process. That of earlier users has ended when they have gone."""
    if config.host_memory is not None or HOST.used_bytes == 0:
        HOST.limit(None if config.host_memory is None else int(config.host_memory))
