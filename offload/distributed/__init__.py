"""Ranks and collectives over `torch.distributed`, which only this package imports."""

from offload.distributed.consensus import (
    NETWORK,
    SAME,
    by_consensus,
    check_alike,
    checksum_of,
    each_by_consensus,
    told_checksum,
)
from offload.distributed.group import (
    DeviceLink,
    place_of,
    world_size,
)
from offload.distributed.placing import (
    is_sharded,
    like,
    local_of,
    part_of,
    placing_of,
    rows_of,
    sum_over_meshes,
)
from offload.distributed.ranks import Ranks, ranks_of

__all__ = [
    "NETWORK",
    "SAME",
    "DeviceLink",
    "Ranks",
    "by_consensus",
    "check_alike",
    "checksum_of",
    "each_by_consensus",
    "is_sharded",
    "like",
    "local_of",
    "part_of",
    "place_of",
    "placing_of",
    "ranks_of",
    "rows_of",
    "sum_over_meshes",
    "told_checksum",
    "world_size",
]
