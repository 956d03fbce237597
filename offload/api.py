"""The calls that users make."""

from __future__ import annotations

from typing import Any

import torch

from offload.budget import HOST
from offload.config import Config
from offload.errors import ConfigError
from offload.heap import keep_freed_memory
from offload.hooks import watch_gradients
from offload.log import LOG
from offload.optim import Request, Session, attach, is_wrapped
from offload.planner import Plan
from offload.reports import Account, Report


def wrap(
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    *,
    elementwise: bool = False,
    measure: bool = False,
    **fields: Any,
) -> Any:
    """Move the optimizer's state to host memory and NVMe, within `host_memory` bytes. The same
    object comes back, and the loop around it stays as it is.

    elementwise: an optimizer of your own treats each element of a parameter by itself. measure:
    spend about a second on the speed of drives and update, so that plan and report can predict a
    step; it writes up to 384 MiB. fields: those of `Config`.
    """
    config = Config.of(config, **fields)
    request = Request.of(optimizer, config, elementwise, measure)
    before = HOST.limit_bytes
    _set_limit(config)
    try:
        session = Session(
            optimizer,
            request.recipe,
            config,
            request.host_bytes,
            watch_gradients,
            speeds=request.plan.speeds,
        )
        try:
            session.updater.take_in(request.states)
        except BaseException:
            session.close()
            raise
    except BaseException:
        HOST.put_back_limit(before)
        raise
    kind = type(optimizer).__name__
    attach(optimizer, session)
    if any(record.param.is_cpu for record in session.updater.records):
        keep_freed_memory()
    LOG.info("%s is wrapped:\n%s", kind, session.plan)
    return optimizer


def plan(
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    *,
    elementwise: bool = False,
    measure: bool = False,
    **fields: Any,
) -> Plan:
    """What `wrap` with the same arguments would do, and the same refusals. Nothing is kept, and
    without `measure` nothing allocated.
    """
    return Request.of(optimizer, Config.of(config, **fields), elementwise, measure).plan


def report(optimizer: Any) -> Report:
    """What a wrapped optimizer has done: bytes, seconds by cause, fall-backs."""
    session: Session = _wrapped_one(optimizer)._offload_session
    total, speeds = session.metrics.snapshot(), session.ledger.speeds
    return Report(
        plan=session.plan,
        total=Account.of(total, speeds),
        last=Account.of(session.ledger.last, speeds),
        outside=dict(total.outside),
        speeds=speeds,
        fallbacks=dict(total.fallbacks),
        disk_engine=session.store.stats().engine if session.store else None,
        host_peak_bytes=session.pool.stats().peak_bytes if session.pool else 0,
        events=session.metrics.events(),
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
