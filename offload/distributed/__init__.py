"""Ranks and collectives over `torch.distributed`, which only this package imports."""

from offload.distributed.group import (
    Connections,
    Members,
    connections_of,
    deadline_of,
    default_store,
    is_connected,
    is_initialised,
    members_of,
    name_for,
    place_of,
)
from offload.distributed.link import DeviceLink
from offload.distributed.placing import (
    DTensorPlacement,
    Rows,
    is_sharded,
    like,
    local_of,
    part_of,
    placing_of,
    rows_of,
    sum_over_meshes,
)
from offload.distributed.ranks import Ranks, ranks_of
from offload.distributed.worker import Worker

__all__ = [
    "Connections",
    "DTensorPlacement",
    "DeviceLink",
    "Members",
    "Ranks",
    "Rows",
    "Worker",
    "connections_of",
    "deadline_of",
    "default_store",
    "is_connected",
    "is_initialised",
    "is_sharded",
    "like",
    "local_of",
    "members_of",
    "name_for",
    "part_of",
    "place_of",
    "placing_of",
    "ranks_of",
    "rows_of",
    "sum_over_meshes",
]
