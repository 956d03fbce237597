"""The start of a session for a plain optimizer; among ranks it starts on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.core.budget import HOST
from offload.core.config import Config
from offload.distributed import DeviceLink, Ranks, check_alike, each_by_consensus
from offload.optim.agreement import remedy_at_start, start_facts
from offload.optim.buckets import stage_of
from offload.optim.request import WrapRequest
from offload.optim.resources import Watch, WatchPasses
from offload.optim.session import Session
from offload.planning.limits import limited


def open_session(
    optimizer: torch.optim.Optimizer,
    configure: Callable[[], Config],
    elementwise: bool,
    measured: bool,
    watch: Watch,
    watch_passes: WatchPasses,
    ranks: Ranks | None,
) -> Session:
    """Open a session that takes over the optimizer's state. If this raises, everything it took is
    released.

    configure: returns the settings, or refuses them. ranks: None if the state is not shared;
    otherwise all ranks call it, and an error on one is an error on all. Blocks.
    """
    opened: list[Session] = []
    limit_before = HOST.limit_bytes

    def open_here(link: DeviceLink | None = None) -> Session:
        config = configure()
        place = ranks.place if ranks is not None else None
        request = WrapRequest.of(optimizer, config, elementwise, measured, place)
        with limited(config, f"{type(optimizer).__name__}, wrapped"):
            session = Session(
                optimizer,
                request.recipe,
                config,
                request.host_bytes,
                watch,
                speeds=request.plan.speeds,
                ranks=ranks,
                watch_passes=watch_passes,
                link=link,
                chosen=request.chosen,
            )
            opened.append(session)
            session.updater.take_in(request.states)
        return session

    try:
        if ranks is None:
            return open_here()
        link = _connect(optimizer, ranks)
        return _open_together(lambda: open_here(link), ranks)
    except BaseException:
        for session in opened:
            session.close()
        if ranks is not None:
            ranks.close()
            HOST.put_back_limit(limit_before)
        raise


def _connect(optimizer: torch.optim.Optimizer, ranks: Ranks) -> DeviceLink | None:
    """Connect the devices that the parameters are on; None if those are in host memory. Every other
    fault of the optimizer is refused later.
    """
    groups = getattr(optimizer, "param_groups", ())
    params = [param for group in groups for param in group["params"]]
    params.sort(key=lambda param: not param.requires_grad)  # frozen ones are not shared
    device = params[0].device if params else torch.device("cpu")
    kinds = ranks.exchange({"the kind of device": device.type}, "device")
    check_alike("device", kinds, "give all ranks parameters on devices of one kind")
    return None if device.type == "cpu" else ranks.link(device)


def _open_together(open_here: Callable[[], Session], ranks: Ranks) -> Session:
    opened: list[Session] = []

    def act() -> dict[str, Any]:
        opened.append(open_here())
        config = opened[0].config
        return {
            "release_grads (the stage)": stage_of(config),
            "max_grad_norm": config.max_grad_norm,
            "host_memory": None if config.host_memory is None else int(config.host_memory),
            **start_facts(opened[0].updater.records),
        }

    check_alike("wrap", each_by_consensus(ranks, "wrap", act), remedy_at_start)
    return opened[0]
