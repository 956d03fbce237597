"""The start of a session for a plain optimizer; among ranks it starts on all of them or on none.

What `wrap` and `plan` are asked for is checked and drawn up here, so that both refuse the same
before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offload.core.budget import HOST
from offload.core.config import Config
from offload.core.errors import ConfigError
from offload.core.metrics import Metrics
from offload.distributed.consensus import check_alike, each_by_consensus
from offload.distributed.group import DeviceLink
from offload.distributed.ranks import Ranks
from offload.optim.agreement import remedy_at_start, start_facts
from offload.optim.buckets import no_buckets, place_of, share_out, stage_of
from offload.optim.choose import choose_recipe
from offload.optim.coordinator import StepCoordinator, Watch
from offload.optim.optimizer import is_wrapped
from offload.optim.recipe import NativeRecipe, Record
from offload.optim.records import OptimizerDraft, check_grad_buffers, facts_of, make_records
from offload.optim.session import Session
from offload.optim.sharded_coordinator import ShardedCoordinator
from offload.optim.sharded_update import WatchPasses
from offload.optim.source import states_of
from offload.optim.traffic import measure
from offload.planning.limits import (
    check_directories,
    host_bytes,
    limited,
    refuse_unbuilt,
    telling_of_the_budget,
)
from offload.planning.planner import Budgets
from offload.planning.training import plan_training
from offload.planning.tuning import choose

_UNBUILT = (
    "device_memory",
    "param_dtype",
    "state_dtype",
    "activations",
    "prefetch_depth",
)


def draw_up(
    optimizer: torch.optim.Optimizer,
    config: Config,
    elementwise: bool,
    measured: bool = False,
    place: tuple[int, int] | None = None,
) -> OptimizerDraft:
    """Check the arguments of `wrap` and draw up what it would open; raise where that cannot work.
    Changes nothing. measured: with measured speeds, which takes time. place: rank and count of the
    ranks that share the state.
    """
    check_wrappable(optimizer)
    refuse_unbuilt(config, _UNBUILT, "wrap")
    _check_device(optimizer, config)
    check_directories(config)
    recipe = choose_recipe(optimizer, elementwise)
    _refuse_strangers(optimizer)
    records = make_records(optimizer, recipe, optimizer.state)
    buckets = share_out(no_buckets(place, config), records) if place else None
    share = buckets.share(stage_of(config), place_of(records)) if buckets else None
    facts = facts_of(records, config, share)
    states = states_of(optimizer, records, recipe)
    directories = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
    allowed_bytes, held_bytes = host_bytes(config)
    params = [record.param for record in records]
    device = params[0].device.type if params else "cpu"
    chosen = choose(config, params, device, place is not None).in_force(config, True)
    budgets = Budgets(
        allowed_bytes,
        directories=len(directories),
        held_bytes=held_bytes,
        chunk_numel=chosen.tuning.chunk_numel,
    )
    with telling_of_the_budget(config):
        plan = plan_training(facts, budgets).state
    _refuse_release(config, records)
    check_grad_buffers(config, plan)
    if measured:
        speeds = measure(plan, directories, isinstance(recipe, NativeRecipe))
        plan = replace(plan, speeds=speeds)
    return OptimizerDraft(recipe, records, plan, budgets, chosen, buckets, states)


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
        draft = draw_up(optimizer, config, elementwise, measured, place)
        with limited(config, f"{type(optimizer).__name__}, wrapped"):
            metrics = Metrics(strict=config.strict)
            draft.chosen.begin(metrics)
            coordinator = StepCoordinator(config, metrics, watch)
            if ranks is not None:
                coordinator = ShardedCoordinator(ranks, config, metrics, watch, watch_passes, link)
            session = Session(optimizer, draft, config, coordinator)
            opened.append(session)
            session.updater.take_in(draft.states)
        return session

    try:
        if ranks is None:
            return open_here()
        link = _connect(optimizer, ranks)
        said = each_by_consensus(ranks, "wrap", lambda: _facts_of(open_here(link)))
        check_alike("wrap", said, remedy_at_start)
        return opened[0]
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


def _facts_of(session: Session) -> dict[str, Any]:
    """Return what must be the same on all ranks that share the state."""
    config = session.config
    return {
        "release_grads (the stage)": stage_of(config),
        "max_grad_norm": config.max_grad_norm,
        "host_memory": None if config.host_memory is None else int(config.host_memory),
        **start_facts(session.updater.records),
    }


# --- what is refused ------------------------------------------------------------------------------


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
