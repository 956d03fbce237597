"""The needs of each rank where a model is sharded over ranks. A pure function of sizes.

Each rank has a shard of every unit's block, of its gradients and of its optimizer state. To compute
with a unit its block is all-gathered, for a while, and its gradients are whole until their
reduce-scatter: one unit at a time at least, beside the units that hold others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.core.config import format_size
from offload.distributed.placing import Partition
from offload.planning.unit import Unit, UnitSizes, on_device_bytes

DEPTH = 2  # gathered blocks ahead, by default: all ranks need the same number


@dataclass(frozen=True)
class Sharding:
    """The sharding of a model over `count` ranks, of which this is `rank`. whole_bytes: for
    gathered blocks. gradient_bytes: for whole gradients in flight. Both are the same on all ranks.
    depth: the prefetch depth of gathered blocks. on_device: gathered blocks and whole gradients are
    on a device.
    """

    rank: int
    count: int
    whole_bytes: int = 0
    gradient_bytes: int = 0
    depth: int = DEPTH
    on_device: bool = False

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.count}, stage 3: 1/{self.count} of parameters, gradients "
            f"and state here; {format_size(self.whole_bytes)} for gathered parameters, "
            f"{self.depth} units ahead, {format_size(self.gradient_bytes)} for whole gradients"
            f"{', on the device' if self.on_device else ''}"
        )

    @property
    def fixed_bytes(self) -> int:
        return self.whole_bytes + self.gradient_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory for gathered blocks and whole gradients."""
        return 0 if self.on_device else self.fixed_bytes

    @property
    def arithmetic(self) -> str:
        """What these bytes are for, in a refusal."""
        return (
            f"on each rank; gathered from {self.count} ranks one unit needs "
            f"{format_size(self.whole_bytes)} with {self.depth} more ahead, and whole "
            f"gradients on their way {format_size(self.gradient_bytes)} (a lower "
            "prefetch_depth needs less)"
        )

    def partition_of(self, unit: Unit) -> Partition:
        return Partition(unit.nbytes, self.count)

    def shard_bytes(self, unit: Unit) -> int:
        return self.partition_of(unit).shard_bytes

    def whole_of(self, unit: Unit) -> int:
        """Return the bytes of a unit's block where it is gathered."""
        padded = self.partition_of(unit).padded_bytes
        return on_device_bytes(padded) if self.on_device else padded

    def own(self, unit: Unit, param: object) -> tuple[int, int]:
        """Return the elements of a parameter of the unit that belong to this rank."""
        member = next(m for m in unit.members if m.param is param)
        numel, itemsize = member.shape.numel(), member.dtype.itemsize
        return self.partition_of(unit).own(self.rank, member.begin, numel, itemsize)

    def with_least(self, units: Sequence[Unit], trained: Sequence[int]) -> Sharding:
        """Return the sharding with the least bytes with which the model works and blocks are
        prefetched. trained: numbers of the units that have gradients.
        """
        sizes = UnitSizes.of(units, self.whole_of)
        whole = sizes.nbytes
        ahead = self.depth * max(whole, default=0)
        grads = [size if n in trained else 0 for n, size in enumerate(whole)]
        # From a device a shard goes to host memory, which has room for it (`staging_bytes`).
        shards = [0 if self.on_device else self.shard_bytes(units[n]) for n in trained]
        # One unit's gradients are made while another's are in flight, with the reduced shards.
        gradients = sizes.least_of(grads) + max(grads, default=0) + 2 * max(shards, default=0)
        return replace(
            self,
            whole_bytes=min(sum(whole), sizes.least_of(whole) + ahead),
            gradient_bytes=min(sum(grads) + sum(shards), gradients),
        )

    def with_room(self, units: Sequence[Unit], left_bytes: int) -> Sharding:
        """Return the sharding with more bytes for gathered blocks, which then stay longer, where
        there is room.
        """
        whole = sum(map(self.whole_of, units))
        return replace(self, whole_bytes=min(whole, self.whole_bytes + max(0, left_bytes)))
