"""How an optimizer's parameters are put together and shared out over ranks.

A bucket holds parameters of one type, one behind the other, each at a multiple of 64 bytes, about
`bucket_bytes` in all; a larger parameter has a bucket for itself. Each bucket is cut into equal
slices, one a rank: `Partition`. They are in the order in which backward most likely brings the
gradients, the reverse of the optimizer's. What goes over the network at once is a round: the same
part of everybody's slice, so that buffers need not be as large as the largest parameter.

A parameter keeps its place as long as it is there: new ones come behind, in buckets of their own.
So no state moves to another rank when the plan is made anew. Pure numbers; all ranks come to the
same ones.
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
from offload.distributed.partition import ALIGN_BYTES, Partition
from offload.optim.recipe import Record
from offload.planning.rank_share import RankShare

BUCKET_BYTES = 32 << 20
LEAST_BUCKET_BYTES = 64 << 10
HOST = torch.device("cpu")
BUFFERS = 2  # one is filled or emptied while the other is on the network
_OF_THE_BUDGET = 16  # two buffers take an eighth of a small one
_ROUND_ALIGN = 16  # elements
_PAGE = 4096


def bucket_bytes_for(host_memory: int | None) -> int:
    """host_memory: as the user gave it, which all ranks must do alike."""
    if host_memory is None:
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, host_memory // _OF_THE_BUDGET))


def no_buckets(place: tuple[int, int], config: Config) -> Buckets:
    """Before there are parameters. place: rank and count of ranks."""
    given = None if config.host_memory is None else int(config.host_memory)
    return Buckets(*place, bucket_bytes_for(given))


def stage_of(config: Config) -> int:
    """Of an optimizer among ranks."""
    return 2 if config.release_grads else 1


def share_out(buckets: Buckets, records: Sequence[Record]) -> Buckets:
    """Buckets for these parameters; each is told which elements are ours. Refused where they are
    not all in one place.
    """
    place_of(records)
    found = buckets.of(records)
    for record in records:
        record.own = found.own(record.number)
    return found


def place_of(records: Sequence[Record]) -> torch.device:
    """Where the parameters are that are shared: all on one device, or all in host memory."""
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
    """Where a parameter is in its bucket: from element `begin` on. number: its record's; None: it
    is not the optimizer's any more.
    """

    param: Tensor
    number: int | None
    begin: int
    numel: int


@dataclass(frozen=True)
class RoundSpan:
    """Elements [first, end) of a parameter, at element `at` of a round's part."""

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
    def slice_numel(self) -> int:
        """Elements of each rank's slice, padding included."""
        return self.partition.slice_bytes // self.dtype.itemsize

    @property
    def name(self) -> str:
        return f"bucket {self.number}"

    def own(self, rank: int, place: BucketPlace) -> tuple[int, int]:
        """The elements of the parameter that are a rank's."""
        itemsize = self.dtype.itemsize
        return self.partition.own(rank, place.begin * itemsize, place.numel, itemsize)

    def rounds(self, buffer_bytes: int, itemsize: int) -> list[tuple[int, int]]:
        """Elements [begin, end) of everybody's slice that go together, where a buffer holds so many
        bytes, and an element has `itemsize` of them.
        """
        most = buffer_bytes // (self.count * itemsize) // _ROUND_ALIGN * _ROUND_ALIGN
        assert most, "a buffer holds some elements of each rank"
        return [
            (begin, min(begin + most, self.slice_numel))
            for begin in range(0, self.slice_numel, most)
        ]

    def spans(self, rank: int, begin: int, end: int) -> Iterator[RoundSpan]:
        """What of parameters is in elements [begin, end) of a rank's slice."""
        low, high = rank * self.slice_numel + begin, rank * self.slice_numel + end
        for place in self.places:
            first, last = max(low, place.begin), min(high, place.begin + place.numel)
            if first < last and place.number is not None:
                yield RoundSpan(place.number, first - place.begin, last - place.begin, first - low)


class Buckets:
    """Those of one rank's optimizer. `of` gives them for its parameters as they are."""

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
        """With these parameters; those that were there before stay where they are."""
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
        """In the order in which their last parameter comes."""
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
        """Elements of a parameter that are this rank's; None: it is in no bucket."""
        if number not in self._of:
            return None
        bucket, place = self._of[number]
        return bucket.own(self.rank, place)

    @property
    def numbers(self) -> Sequence[int]:
        """Of all parameters that are shared."""
        return tuple(self._of)

    @property
    def in_order_of_update(self) -> list[Bucket]:
        """Chunks of state are laid out in the optimizer's order, one type behind the other."""
        kinds: dict[torch.dtype, int] = {}
        for bucket in reversed(self.each):
            kinds.setdefault(bucket.dtype, len(kinds))
        return sorted(self.each, key=lambda bucket: (kinds[bucket.dtype], -bucket.number))

    @property
    def whole_bytes(self) -> int:
        """Of the largest round: everybody's part."""
        most = self._bucket_bytes + self.count * ALIGN_BYTES
        return min(max((b.partition.padded_bytes for b in self.each), default=0), most)

    @property
    def part_bytes(self) -> int:
        """Of one rank's part of the largest round."""
        return _up(-(-self.whole_bytes // self.count), ALIGN_BYTES)

    @property
    def slices_bytes(self) -> int:
        """Of this rank's slices of all buckets."""
        return sum(bucket.partition.slice_bytes for bucket in self.each)

    def share(self, stage: int, place: torch.device = HOST) -> RankShare:
        """A buffer holds a round, where the parameters are; with gradients also a part that is
        added to another, in host memory.
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
            grad_bytes=_up(self.slices_bytes, _PAGE) if is_reduced else 0,
            param_bytes=sum(bucket.partition.padded_bytes for bucket in self.each),
            device_buffer_bytes=0 if is_in_host else whole_bytes,
        )

    @property
    def digest(self) -> int:
        """Of what is where, to be compared over ranks."""
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
