"""Which ranks this process belongs to, and connections between them for small things."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offload.core.errors import ConfigError

_NOT_IN_IT = (
    "process_group: this rank is not in it; give each rank a group that it belongs to, or False"
)


def is_initialised() -> bool:
    """Whether this process has been told of a group, be it alone in it."""
    return dist.is_available() and dist.is_initialized()


def is_connected() -> bool:
    """Whether this process belongs to a group of several."""
    return is_initialised() and dist.get_world_size() > 1


def place_of(process_group: Any) -> tuple[int, int] | None:
    """Rank and count of those to share with; None: as in `ranks_of`. Asks nobody else."""
    if process_group is False or not is_connected():
        if process_group:
            raise ConfigError(
                "process_group: torch.distributed is not initialised, or has one process; call "
                "init_process_group, or leave it out"
            )
        return None
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to the others
        raise ConfigError(_NOT_IN_IT)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group: expected a group of torch.distributed, False for none, or None for "
            f"the default one, got {type(process_group).__name__}"
        )
    if dist.get_rank(process_group) < 0:
        raise ConfigError(_NOT_IN_IT)
    count = dist.get_world_size(process_group)
    return None if count == 1 else (dist.get_rank(process_group), count)


def deadline_of(process_group: Any) -> float:
    """Seconds that a group lets its members wait for one another (the `timeout=` of
    `init_process_group`), the default group's for None.
    """
    group = process_group or dist.distributed_c10d._get_default_group()
    limits = [
        backend.options._timeout.total_seconds()
        for device in group._device_types
        if hasattr(backend := group._get_backend(device), "options")
    ]
    return min(limits, default=dist.distributed_c10d.default_pg_timeout.total_seconds())


class Members(NamedTuple):
    """rank: of this process among `ranks`, which are numbers in the default group."""

    rank: int
    ranks: list[int]


def members_of(process_group: Any) -> Members | None:
    """Who belongs to it (None: all there are). None: this process is alone, or it says False."""
    if process_group is False or not is_connected():
        return None
    ranks = dist.get_process_group_ranks(process_group)
    rank = dist.get_rank(process_group)
    return Members(rank, ranks) if len(ranks) > 1 and rank >= 0 else None


def default_store() -> Any:
    """What all ranks can read and write: small texts by name."""
    return dist.distributed_c10d._get_default_store()


def name_for(what: str, ranks: Sequence[int]) -> str:
    """Of something that these have in common, in the store. That may outlive the processes:
    torchrun starts others with it, which must not find what those before have left there.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"offload/{what}/{start}/{'.'.join(map(str, ranks))}"


def connections_of(name: str, members: Members, deadline_s: float) -> Connections:
    """New connections between members, who all call it with the same `name`, used once."""
    store = dist.distributed_c10d.PrefixStore(name, default_store())
    limit = timedelta(seconds=deadline_s)
    return Connections(dist.ProcessGroupGloo(store, members.rank, len(members.ranks), limit))


class Connections:
    """Connections in host memory, outside of the groups that `torch.distributed` counts: it names a
    new one by the number of those that a process has, in which ranks may differ.
    """

    def __init__(self, group: Any) -> None:
        self._group: Any = group

    def gather(self, found: Sequence[Tensor], mine: Tensor, deadline_s: float) -> Any:
        """Start to fill `found` with everybody's; returns torch's work."""
        options = torch._C._distributed_c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=deadline_s)
        return self._group.allgather([list(found)], [mine], options)

    def send(self, part: Tensor, rank: int) -> Any:
        return self._group.send([part], rank, 0)

    def receive(self, part: Tensor, rank: int) -> Any:
        return self._group.recv([part], rank, 0)

    def close(self) -> None:
        self._group = None
