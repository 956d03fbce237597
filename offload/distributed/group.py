"""The process group that this process belongs to, gloo connections between its ranks, and links
between their devices: NCCL's collectives, or those of torch's other backends.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offload.core.errors import ConfigError

_NOT_IN_IT = (
    "process_group: this rank is not in it; give each rank a group that it belongs to, or False"
)


def world_size() -> int:
    """Return how many processes `torch.distributed` connects, this one included; 0: it is not
    initialised.
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def place_of(process_group: Any) -> tuple[int, int] | None:
    """Return this process's rank in the group and the count of its ranks; None: the process is
    alone, or `process_group` is False. Refuse an argument that is no group, or a group without this
    rank. Does not communicate.
    """
    if process_group is False or world_size() < 2:
        if process_group:
            raise ConfigError(
                "process_group: torch.distributed is not initialised, or has one process; call "
                "init_process_group, or leave it out"
            )
        return None
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # new_group returns it to non-members
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
    """Return the seconds that a group lets its members wait for one another (the `timeout=` of
    `init_process_group`; the least of its backends'). None means the default group.
    """
    group = process_group or dist.distributed_c10d._get_default_group()
    limits = [
        backend.options._timeout.total_seconds()
        for device in group._device_types
        if hasattr(backend := group._get_backend(device), "options")
    ]
    return min(limits, default=dist.distributed_c10d.default_pg_timeout.total_seconds())


class Members(NamedTuple):
    """The members of a group. rank: this process's index in `ranks`, which are numbers in the
    default group.
    """

    rank: int
    ranks: list[int]


def members_of(process_group: Any) -> Members | None:
    """Return the members of a group (None: the default group). The result is None if this process
    is alone or not in the group, or if `process_group` is False.
    """
    if process_group is False or world_size() < 2:
        return None
    ranks = dist.get_process_group_ranks(process_group)
    rank = dist.get_rank(process_group)
    return Members(rank, ranks) if len(ranks) > 1 and rank >= 0 else None


def default_store() -> Any:
    """Return the rendezvous store, where all ranks can read and write small texts by name."""
    return dist.distributed_c10d._get_default_store()


def name_for(what: str, ranks: Sequence[int]) -> str:
    """Make a name in the store for a thing that these ranks share. The store may outlive the
    processes: torchrun restarts them with the same store, and the new ones must not find the old
    ones' entries. So the name holds torchrun's restart count.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"offload/{what}/{start}/{'.'.join(map(str, ranks))}"


def connections_of(name: str, members: Members, deadline_s: float) -> Connections:
    """Connect the members, who all call it with the same `name`. A name is used once. Blocks up to
    the deadline.
    """
    store = dist.distributed_c10d.PrefixStore(name, default_store())
    limit = timedelta(seconds=deadline_s)
    return Connections(dist.ProcessGroupGloo(store, members.rank, len(members.ranks), limit))


class Connections:
    """A set of gloo connections, outside of the groups that `torch.distributed` counts: torch names
    a new group by the number of groups that a process has, in which ranks may differ.
    """

    def __init__(self, group: Any) -> None:
        self._group: Any = group

    def gather(self, found: Sequence[Tensor], mine: Tensor, deadline_s: float) -> Any:
        """Begin the all-gather of `mine` into `found`; return torch's work."""
        options = torch._C._distributed_c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=deadline_s)
        return self._group.allgather([list(found)], [mine], options)

    def send(self, part: Tensor, rank: int) -> Any:
        return self._group.send([part], rank, 0)

    def receive(self, part: Tensor, rank: int) -> Any:
        return self._group.recv([part], rank, 0)

    def close(self) -> None:
        self._group = None


def backend_of(device: torch.device) -> str:
    """Return torch's communication backend for such devices; refuse devices that have none."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise ConfigError(
            f"process_group: torch.distributed has no backend for {device.type}, so that what is "
            "on such devices cannot be shared out over ranks; use a build of torch that has one "
            "(NCCL for cuda), or give process_group=False, which shares nothing"
        ) from error


_MADE: Counter[str] = Counter()  # by name: groups of the same ranks made so far


def _connect(members: list[int], rank: int, backend: str, deadline_s: float) -> Any:
    """Make a process group. `new_group` would name it by the number of groups that this process
    has: ranks may differ in that, and would then wait for one another for ever.
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
    """A process group between devices. Its work goes to the current stream. All ranks make the same
    calls in the same order, from one thread.
    """

    def __init__(
        self, members: Sequence[int], backend: str, device: torch.device, deadline_s: float
    ) -> None:
        self._rank = list(members).index(dist.get_rank())
        self._count = len(members)
        self._group = _connect(list(members), self._rank, backend, deadline_s)
        # The first collective connects the devices. It runs here, not in the middle of a step, nor
        # in another thread, where its order relative to the user's own collectives could differ
        # between ranks.
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
        """All-gather in place: every rank has filled its own part of `whole`."""
        dist.all_gather_single(whole, self._own(whole), group=self._group)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Reduce-scatter in place: this rank's part of `whole` becomes the mean over all ranks; the
        other parts are overwritten.
        """
        whole.div_(self._count)
        dist.reduce_scatter_single(self._own(whole), whole, group=self._group)

    def abort(self) -> None:
        """Abort the collectives in flight, so that no device waits for a lost rank. They end with
        undefined values, which no code uses: the ranks agree on no further act.
        """
        with suppress(RuntimeError):  # not every backend can abort
            self._group.abort()

    def close(self) -> None:
        """Release the connections' device memory. No collective may be in flight."""
        if self._group in dist.distributed_c10d._world.pg_map:  # user code may have destroyed all
            dist.destroy_process_group(self._group)

    def _own(self, whole: Tensor) -> Tensor:
        return whole.view(self._count, -1)[self._rank]
