"""Collectives between the devices of several ranks: NCCL's, or what else torch has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.core.errors import ConfigError
from offload.distributed.group import default_store, name_for


def backend_of(device: torch.device) -> str:
    """What torch moves bytes between such devices with."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise ConfigError(
            f"process_group: torch.distributed has no backend for {device.type}, so that what is "
            "on such devices cannot be shared out over ranks; use a build of torch that has one "
            "(NCCL for cuda), or give process_group=False, which shares nothing"
        ) from error


_MADE: Counter[str] = Counter()  # groups of the same ranks so far


def _connect(members: list[int], rank: int, backend: str, deadline_s: float) -> Any:
    """As `new_group`, which names a group by the number of those that this process has: ranks may
    differ in that, and would wait for one another for ever.
    """
    world = dist.distributed_c10d._get_default_group()
    if world.bound_device_id is not None and len(members) < world.size():
        raise ConfigError(
            "process_group: with init_process_group(device_id=...) torch makes new groups out of "
            "the default one, which needs all ranks, and these are some of them; leave device_id "
            "out, or share over all ranks"
        )
    name = name_for(backend, members)
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(members),
        rank,
        members,
        dist.Backend(backend),
        default_store(),
        dist.distributed_c10d.GroupName(f"{name}/{_MADE[name]}"),
        timeout=timedelta(seconds=deadline_s),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {m: n for n, m in enumerate(members)}
    _MADE[name] += 1
    return group


class DeviceLink:
    """Work goes to the current stream. All ranks call the same in the same order, in one thread."""

    def __init__(
        self, members: Sequence[int], backend: str, device: torch.device, deadline_s: float
    ) -> None:
        self._rank = list(members).index(dist.get_rank())
        self._count = len(members)
        self._group = _connect(list(members), self._rank, backend, deadline_s)
        # Connects them, here and not in the middle of a step, nor in another thread, where it could
        # come in another order with what the program does with its own groups.
        probe = torch.full((self._count,), self._rank, dtype=torch.float32, device=device)
        self.gather(probe)
        found = probe.tolist()
        if found != list(range(self._count)):
            raise ConfigError(
                f"process_group: the devices of ranks {list(members)} should gather "
                f"{list(range(self._count))} with {backend}, and got {found}; is each rank on a "
                "device of its own?"
            )

    def gather(self, whole: Tensor) -> None:
        """Every rank has filled its own part of `whole`; then all have all of it."""
        dist.all_gather_single(whole, self._own(whole), group=self._group)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Make this rank's own part of `whole` the mean of everybody's; the rest is used up."""
        whole.div_(self._count)
        dist.reduce_scatter_single(self._own(whole), whole, group=self._group)

    def abort(self) -> None:
        """Let no device wait for others any more: one has gone. What is under way ends, with any
        values; nothing comes of it, for the ranks agree on nothing any more.
        """
        with suppress(RuntimeError):  # not every backend can
            self._group.abort()

    def close(self) -> None:
        """Give back what the connections hold on the device, when nothing is under way."""
        if self._group in dist.distributed_c10d._world.pg_map:  # the program may have ended all
            dist.destroy_process_group(self._group)

    def _own(self, whole: Tensor) -> Tensor:
        return whole.view(self._count, -1)[self._rank]
