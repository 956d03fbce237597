"""Collectives between the devices of several ranks: NCCL's, or those of torch's other backends."""

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
