"""The parts of tensors that ranks hold: the placement of DTensors, and the partition of a block of
bytes into equal shards.

Shards begin at multiples of 64 bytes: a shard of an aligned block is aligned, and no element lies
in two. All shards have the same size; the last ones may be padding, in part or whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from offload.core.errors import ConfigError, StateError

ALIGN_BYTES = 64


def is_sharded(tensor: object) -> bool:
    """Return whether it is a DTensor, of which this rank holds a part."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, which shares its memory, or an ordinary tensor itself.
    The caller must not keep it: FSDP2 exchanges it.
    """
    if not is_sharded(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    wait = getattr(local, "wait", None)  # it has one if it is the result of a collective in flight
    return wait() if wait is not None else local


@dataclass(frozen=True)
class DTensorPlacement:
    """The placement of a DTensor: its mesh, its placements and its global shape."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]  # the global one

    @property
    def is_partial(self) -> bool:
        """Whether parts must still be summed over ranks."""
        return any(one.is_partial() for one in self.placements)

    def __str__(self) -> str:
        where = ", ".join(map(repr, self.placements))
        return f"{self.shape} placed as ({where}) over a mesh of {tuple(self.mesh.shape)}"


def placing_of(tensor: Tensor) -> DTensorPlacement | None:
    """Return the placement of a DTensor; None for an ordinary tensor."""
    if not is_sharded(tensor):
        return None
    given: Any = tensor
    return DTensorPlacement(given.device_mesh, tuple(given.placements), tuple(given.shape))


def like(param: Tensor, local: Tensor) -> Tensor:
    """Make a DTensor placed as `param` is, with `local`, on any device, as this rank's part; shares
    its memory. Return `local` itself if `param` is no DTensor.
    """
    if not is_sharded(param):
        return local
    from torch.distributed.tensor import DTensor

    # Not `from_local`: that would move `local` to the mesh's device, and with CPU offload it must
    # stay in host memory.
    spec: Any = param._spec  # type: ignore[attr-defined]
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    made: Any = DTensor
    return cast("Tensor", made(local, replace(spec, tensor_meta=meta), requires_grad=False))


def part_of(param: Tensor, whole: Tensor) -> Tensor | None:
    """Return the part of an ordinary tensor that this rank would hold if it were placed as the
    DTensor `param` is; shares its memory. None if the shape differs from the global one, or if
    placements are not plain `Shard` or `Replicate`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placing = placing_of(param)
    assert placing is not None
    simple = all(type(one) in (Shard, Replicate) for one in placing.placements)
    if not simple or tuple(whole.shape) != placing.shape:
        return None
    shape, begin = compute_local_shape_and_global_offset(
        placing.shape, placing.mesh, placing.placements
    )
    part = whole
    for dim, (size, first) in enumerate(zip(shape, begin, strict=True)):
        part = part.narrow(dim, first if size else 0, size)
    return part


def sum_over_meshes(
    values: Sequence[tuple[DTensorPlacement | None, float]], went_well: bool
) -> float:
    """Sum the values that all ranks have for their parts of DTensors; the result has the same bits
    on all. A value that several ranks hold as replicas counts once, as the first of them has it;
    this also holds for ordinary tensors beside the DTensors.

    A collective: every rank passes the same placings in the same order. A rank that has failed
    calls it with `went_well=False`: then all others raise `StateError`, and no rank waits for it.
    """
    first = next(placing.mesh for placing, _ in values if placing is not None)
    by_mesh: dict[Any, dict[tuple[Any, ...] | None, list[float]]] = {}
    for placing, value in values:
        mesh, placements = (placing.mesh, placing.placements) if placing else (first, None)
        by_mesh.setdefault(mesh, {}).setdefault(placements, []).append(value)
    found: list[float] = []
    failed: set[int] = set()
    for mesh, kinds in by_mesh.items():
        own = [0.0 if went_well else 1.0, *(math.fsum(each) for each in kinds.values())]
        table = _gathered(mesh, own)
        failed |= set(mesh.mesh[table[..., 0] != 0].tolist())
        for column, placements in enumerate(kinds, start=1):
            found += _once(table[..., column], placements)
    if failed and went_well:
        raise StateError(
            f"step: rank {', '.join(map(str, sorted(failed)))} could not take part, so that the "
            "norm of all gradients is not known; its own error tells why. Nothing has changed here"
        )
    return math.fsum(found)


def _once(table: Tensor, placements: tuple[Any, ...] | None) -> list[float]:
    """Return the values without replicas. placements: None if all ranks hold replicas."""
    for dim in reversed(range(table.dim())):
        if placements is None or placements[dim].is_replicate():
            table = table.select(dim, 0)
    return cast("list[float]", table.reshape(-1).tolist())


def _gathered(mesh: Any, own: Sequence[float]) -> Tensor:
    """All-gather the values of each rank of a mesh, indexed by its coordinates in the mesh."""
    table = torch.tensor(own, dtype=torch.float64, device=mesh.device_type)
    try:
        for dim in reversed(range(mesh.ndim)):
            every = table.new_empty((mesh.size(dim), *table.shape))
            dist.all_gather_single(every.view(-1), table.reshape(-1), group=mesh.get_group(dim))
            table = every
    except RuntimeError as error:
        raise StateError(
            f"step: the ranks of the mesh {tuple(mesh.shape)} could not exchange the norms of "
            f"their gradients; has one of them gone? {error}"
        ) from error
    return table.cpu()


class Rows(NamedTuple):
    """The rows [begin, end) of a tensor that a rank holds. is_first_holder: it is the first of the
    ranks that hold these rows.
    """

    begin: int
    end: int
    is_first_holder: bool


def rows_of(name: str, tensor: Any) -> Rows:
    """Return the rows of a DTensor that this rank holds. Refuse one that is sharded in another way
    than by rows.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(not (each.is_replicate() or each.is_shard(0)) for each in placements):
        raise ConfigError(
            f"{name}: is spread over ranks as {placements}; only rows (Shard(0)) and copies "
            "(Replicate()) can be in a checkpoint"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    where = mesh.get_coordinate()
    if where is None or not shape:
        return Rows(0, 0, False) if where is None else Rows(0, 1, not any(where))
    copies = [at for at, each in zip(where, placements, strict=True) if each.is_replicate()]
    return Rows(offset[0], offset[0] + shape[0], not any(copies))


@dataclass(frozen=True)
class Partition:
    """A partition of a block of `nbytes` over `count` ranks."""

    nbytes: int
    count: int

    def __post_init__(self) -> None:
        assert self.nbytes >= 0 and self.count >= 1, self

    @property
    def shard_bytes(self) -> int:
        """The bytes of each rank's shard, padding included."""
        each = -(-self.nbytes // self.count)
        return -(-each // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def padded_bytes(self) -> int:
        """The bytes of all shards together."""
        return self.shard_bytes * self.count

    def span(self, rank: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of the block in a rank's shard; an empty range at the end
        of the block if the shard is all padding.
        """
        assert 0 <= rank < self.count, (rank, self)
        begin = min(rank * self.shard_bytes, self.nbytes)
        return begin, min(begin + self.shard_bytes, self.nbytes)

    def own(self, rank: int, begin: int, numel: int, itemsize: int) -> tuple[int, int]:
        """Return the elements [first, end) in a rank's shard, of a parameter of `numel` elements
        that begins at byte `begin` of the block; (0, 0) if it has none.
        """
        assert begin % itemsize == 0, (begin, itemsize)
        low, high = self.span(rank)
        first = max(0, -(-(low - begin) // itemsize))
        end = min(numel, -(-(high - begin) // itemsize))
        return (first, end) if first < end else (0, 0)
