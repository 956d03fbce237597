"""Collectives between the devices of several ranks: NCCL's, or what else torch has for them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import ConfigError


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


class DeviceLink:
    """Work goes to the current stream. All ranks call the same in the same order, in one thread."""

    def __init__(self, members: Sequence[int], backend: str, deadline_s: float) -> None:
        self._rank = list(members).index(dist.get_rank())
        self._count = len(members)
        self._group: Any = dist.new_group(
            list(members),
            timeout=timedelta(seconds=deadline_s),
            backend=backend,
            use_local_synchronization=True,
        )

    def gather(self, whole: Tensor) -> None:
        """Every rank has filled its own part of `whole`; then all have all of it."""
        dist.all_gather_single(whole, self._own(whole), group=self._group)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Make this rank's own part of `whole` the mean of everybody's; the rest is used up."""
        whole.div_(self._count)
        dist.reduce_scatter_single(self._own(whole), whole, group=self._group)

    def _own(self, whole: Tensor) -> Tensor:
        return whole.view(self._count, -1)[self._rank]
