"""How an optimizer's parameters are grouped in buckets and sharded over ranks.

A bucket holds parameters of one dtype, one behind the other, each at a multiple of 64 bytes, about
`bucket_bytes` in all; a larger parameter has a bucket for itself. Each bucket is cut into equal
shards, one per rank: `Partition`. Buckets are in the order in which backward most likely produces
the gradients, the reverse of the optimizer's. One collective carries a round: the same part of
every rank's shard, so that buffers need not be as large as the largest parameter.

A parameter keeps its place as long as the optimizer has it; new ones are appended in buckets of
their own. So no state moves to another rank when the plan is made again. All of this is arithmetic
on sizes, and every rank computes the same result.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from offload.core.config import Config
from offload.core.errors import ConfigError
from offload.distributed.placing import ALIGN_BYTES, Partition
from offload.optim.recipe import Record
from offload.planning.state_plan import RankShare

BUCKET_BYTES = 32 << 20
LEAST_BUCKET_BYTES = 64 << 10
HOST = torch.device("cpu")
BUFFERS = 2  # one is filled or emptied while the other is in a collective
_OF_THE_BUDGET = 16  # so that two buffers take an eighth of a small budget
_ROUND_ALIGN = 16  # elements
_PAGE = 4096


def bucket_bytes_for(host_memory: int | None) -> int:
    """Choose the bucket size. host_memory: the budget the user gave, equal on all ranks."""
    if host_memory is None:
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, host_memory // _OF_THE_BUDGET))


def no_buckets(place: tuple[int, int], config: Config) -> Buckets:
    """Make the buckets of an optimizer without parameters yet. place: rank and count of ranks."""
    given = None if config.host_memory is None else int(config.host_memory)
    return Buckets(*place, bucket_bytes_for(given))


def stage_of(config: Config) -> int:
    """Return the ZeRO stage of an optimizer among ranks: 2 shards the gradients, too."""
    return 2 if config.release_grads else 1


def share_out(buckets: Buckets, records: Sequence[Record]) -> Buckets:
    """Make the buckets for these parameters, and note in each record which elements this rank owns.
    Refuse parameters that are not all on one device or all in host memory.
    """
    place_of(records)
    found = buckets.of(records)
    for record in records:
        record.own = found.own(record.number)
    return found


def place_of(records: Sequence[Record]) -> torch.device:
    """Return the device of the parameters that ranks share (the CPU for host memory). Refuse
    parameters that are not all on the same one; frozen ones are not shared.
    """
    shared = [record for record in records if not record.is_frozen]
    for record in shared:
        if record.device != shared[0].device:
            raise ConfigError(
                f"{record.name}: is on {record.device}, and {shared[0].name} on "
                f"{shared[0].device}; ranks share parameters that are all on one device, or all on "
                "the CPU: move them, make an optimizer for each place, or give "
                "process_group=False, which keeps all of the state on each rank"
            )
    return shared[0].device if shared else HOST


@dataclass(frozen=True, eq=False)
class BucketPlace:
    """The place of a parameter in its bucket: from element `begin` on. number: its record's; None
    if the optimizer does not have the parameter any more.
    """

    param: Tensor
    number: int | None
    begin: int
    numel: int


@dataclass(frozen=True)
class RoundSpan:
    """The elements [first, end) of a parameter, at element `at` of one rank's part of a round."""

    number: int
    first: int
    end: int
    at: int


@dataclass(frozen=True, eq=False)
class Bucket:
    number: int
    dtype: torch.dtype
    places: tuple[BucketPlace, ...]
    count: int  # of ranks

    @cached_property
    def partition(self) -> Partition:
        last = self.places[-1]
        return Partition((last.begin + last.numel) * self.dtype.itemsize, self.count)

    @property
    def shard_numel(self) -> int:
        """The elements of each rank's shard, padding included."""
        return self.partition.shard_bytes // self.dtype.itemsize

    @property
    def name(self) -> str:
        return f"bucket {self.number}"

    def own(self, rank: int, place: BucketPlace) -> tuple[int, int]:
        """Return the elements [first, end) of the parameter that a rank owns."""
        itemsize = self.dtype.itemsize
        return self.partition.own(rank, place.begin * itemsize, place.numel, itemsize)

    def rounds(self, buffer_bytes: int, itemsize: int) -> list[tuple[int, int]]:
        """Cut the shards into rounds: elements [begin, end) of every rank's shard, as many as a
        buffer of `buffer_bytes` holds when an element takes `itemsize` bytes.
        """
        most = buffer_bytes // (self.count * itemsize) // _ROUND_ALIGN * _ROUND_ALIGN
        assert most, "a buffer holds some elements of each rank"
        return [
            (begin, min(begin + most, self.shard_numel))
            for begin in range(0, self.shard_numel, most)
        ]

    def spans(self, rank: int, begin: int, end: int) -> Iterator[RoundSpan]:
        """Yield the parts of parameters that lie in elements [begin, end) of a rank's shard."""
        low, high = rank * self.shard_numel + begin, rank * self.shard_numel + end
        for place in self.places:
            first, last = max(low, place.begin), min(high, place.begin + place.numel)
            if first < last and place.number is not None:
                yield RoundSpan(place.number, first - place.begin, last - place.begin, first - low)


class Buckets:
    """The buckets of one rank's optimizer. `of` makes those for its current parameters."""

    def __init__(
        self, rank: int, count: int, bucket_bytes: int, each: Sequence[Bucket] = ()
    ) -> None:
        self.rank, self.count, self._bucket_bytes = rank, count, bucket_bytes
        self.each = each
        self._of = {
            place.number: (bucket, place)
            for bucket in each
            for place in bucket.places
            if place.number is not None
        }

    def of(self, records: Sequence[Record]) -> Buckets:
        """Make buckets for these parameters; those that have a place already keep it."""
        numbers = {record.param: record.number for record in records}
        each = [
            replace(b, places=tuple(replace(p, number=numbers.get(p.param)) for p in b.places))
            for b in self.each
        ]
        known = {place.param for bucket in each for place in bucket.places}
        for bucket in each:
            _check_types(bucket, records)
        new = [r for r in records if r.param not in known and not r.is_frozen and r.param.numel()]
        each += self._lay_out(new[::-1], len(each))
        return Buckets(self.rank, self.count, self._bucket_bytes, each)

    def _lay_out(self, records: Sequence[Record], number: int) -> list[Bucket]:
        """Fill buckets with new parameters, sorted by the turn of each bucket's last parameter."""
        closed: list[list[Record]] = []
        open_ones: dict[torch.dtype, list[Record]] = {}
        filled: dict[torch.dtype, int] = {}
        for record in records:
            nbytes = _up(record.param.nbytes, ALIGN_BYTES)
            some = open_ones.setdefault(record.dtype, [])
            if some and filled[record.dtype] + nbytes > self._bucket_bytes:
                closed.append(some)
                some = open_ones[record.dtype] = []
            filled[record.dtype] = nbytes + (filled[record.dtype] if some else 0)
            some.append(record)
        turn = {record.number: turn for turn, record in enumerate(records)}
        closed = sorted([*closed, *open_ones.values()], key=lambda some: turn[some[-1].number])
        return [
            Bucket(number + index, some[0].dtype, _places(some), self.count)
            for index, some in enumerate(closed)
        ]

    def bucket_of(self, number: int) -> Bucket:
        return self._of[number][0]

    def place_of(self, number: int) -> tuple[Bucket, BucketPlace]:
        return self._of[number]

    def own(self, number: int) -> tuple[int, int] | None:
        """Return the elements of a parameter that this rank owns; None: it is in no bucket."""
        if number not in self._of:
            return None
        bucket, place = self._of[number]
        return bucket.own(self.rank, place)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of all parameters that ranks share."""
        return tuple(self._of)

    @property
    def in_order_of_update(self) -> list[Bucket]:
        """The buckets as the update completes them: the chunks of state are laid out in the
        optimizer's order, one dtype behind the other.
        """
        kinds: dict[torch.dtype, int] = {}
        for bucket in reversed(self.each):
            kinds.setdefault(bucket.dtype, len(kinds))
        return sorted(self.each, key=lambda bucket: (kinds[bucket.dtype], -bucket.number))

    @property
    def whole_bytes(self) -> int:
        """The bytes of the largest round: the parts of all ranks."""
        most = self._bucket_bytes + self.count * ALIGN_BYTES
        return min(max((b.partition.padded_bytes for b in self.each), default=0), most)

    @property
    def part_bytes(self) -> int:
        """The bytes of one rank's part of the largest round."""
        return _up(-(-self.whole_bytes // self.count), ALIGN_BYTES)

    @property
    def shards_bytes(self) -> int:
        """The bytes of this rank's shards of all buckets."""
        return sum(bucket.partition.shard_bytes for bucket in self.each)

    def share(self, stage: int, place: torch.device = HOST) -> RankShare:
        """Compute what this rank holds and sends. A buffer holds one round, on the parameters'
        device; if gradients are reduced (stage 2), also one part in host memory that is added to
        another.
        """
        is_reduced, is_in_host = stage == 2, place == HOST
        whole_bytes = _up(self.whole_bytes, ALIGN_BYTES)
        buffer_bytes = is_in_host * whole_bytes + is_reduced * self.part_bytes
        return RankShare(
            stage=stage,
            rank=self.rank,
            count=self.count,
            buffers=BUFFERS if self.each else 0,
            buffer_bytes=_up(buffer_bytes, _PAGE),
            grad_bytes=_up(self.shards_bytes, _PAGE) if is_reduced else 0,
            param_bytes=sum(bucket.partition.padded_bytes for bucket in self.each),
            device_buffer_bytes=0 if is_in_host else whole_bytes,
        )

    @property
    def digest(self) -> int:
        """A checksum of the layout, to be compared over ranks."""
        table = [
            (str(b.dtype), [(place.number, place.begin, place.numel) for place in b.places])
            for b in self.each
        ]
        return zlib.crc32(repr(table).encode())


def _places(records: Sequence[Record]) -> tuple[BucketPlace, ...]:
    places, begin = [], 0
    align = ALIGN_BYTES // records[0].dtype.itemsize
    for record in records:
        places.append(BucketPlace(record.param, record.number, begin, record.param.numel()))
        begin = _up(begin + record.param.numel(), align)
    return tuple(places)


def _check_types(bucket: Bucket, records: Sequence[Record]) -> None:
    for place in bucket.places:
        if place.number is not None and records[place.number].dtype != bucket.dtype:
            raise ConfigError(
                f"{records[place.number].name}: is {records[place.number].dtype} now, but was "
                f"{bucket.dtype} when it was shared out over ranks; close() the optimizer before "
                "its parameters are cast, and wrap it again"
            )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
