"""The ranks that save or load one checkpoint together, or one process by itself.

They talk over a side channel of their own, made when the save begins and closed when it ends: a
background save cannot get mixed up with training or with another save. Everything is done in
phases. A phase ends alike on all ranks: well, or with an error of one kind, which the rank where it
happened raises and the other ranks report. A rank that leaves ends the side channel for all, so
that no rank waits for it.

They divide a checkpoint's bytes among them, by pure arithmetic that is equal on every rank. A
tensor that all ranks hold, with the same values, is divided: all such tensors of a file, laid end
to end, are cut into as many equal lengths as there are ranks, at block boundaries of the file, so
that hardly any block has two writers. For every other tensor each rank states itself which bytes
are its own. `share_of` divides the work of reading: it tells which rank checks which parts.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from offload.checkpoint.disk import BLOCK_BYTES
from offload.core.errors import StateError
from offload.distributed.consensus import check_alike, each_by_consensus
from offload.distributed.side_channel import SideChannel, open_side_channel
from offload.storage.safetensors_header import TensorPlace, TensorSpec

T = TypeVar("T")
Range = tuple[int, int]  # begin and end, in bytes

ARRIVAL_S = 60.0  # until all ranks have reached the same save or load


class RankGroup:
    """The ranks of one save or load. what: the save or load, for messages. side_channel: None for
    one process. One thread at a time may use it; any thread may call `cancel` and `leave`.
    """

    told_errors: type[BaseException] = BaseException

    def __init__(self, what: str, side_channel: SideChannel | None) -> None:
        self.what, self._side_channel = what, side_channel
        self.rank = side_channel.rank if side_channel is not None else 0
        self.count = side_channel.count if side_channel is not None else 1
        self.is_first = self.rank == 0

    @classmethod
    def gather(cls, what: str, process_group: Any) -> RankGroup:
        """Wait until every rank has reached this point of its program; a `StateError` names the
        ranks that have not. process_group: as in a `Config`.
        """
        return cls(what, open_side_channel(what, process_group, ARRIVAL_S))

    def by_consensus(self, phase: str, act: Callable[[], Any]) -> list[Any]:
        """Run `act` on every rank; return the results (JSON) of all, by rank, when all have one. If
        it fails on one rank, all raise. It may take any time, as long as every rank gives signs of
        life.
        """
        if self._side_channel is None:
            return [act()]
        self._side_channel.begin(self.what)
        return each_by_consensus(self, f"{phase} of {self.what}", act)

    def own_by_consensus(self, phase: str, act: Callable[[], T]) -> T:
        """Run `act` on every rank as `by_consensus` does, and return this rank's own result, which
        may be anything.
        """
        found: list[T] = []
        self.by_consensus(phase, lambda: found.append(act()))
        return found[0]

    def exchange(self, value: Any, what: str, deadline_s: float | None = None) -> list[Any]:
        """All-gather one value from each rank, once all ranks have reached the phase `what`."""
        assert self._side_channel is not None, "one process has no one to ask"
        heard = self._side_channel.exchange([what, value])
        for rank, (phase, _) in enumerate(heard):
            if phase != what:
                raise StateError(
                    f"{self.what}: rank {rank} is at {phase}, rank {self.rank} at {what}; do the "
                    "same on every rank"
                )
        return [theirs for _, theirs in heard]

    def agree(self, phase: str, entries: Mapping[str, str], remedy: str) -> None:
        """Raise `ConfigError` on all ranks if their entries differ; name the first that does."""
        if self.count == 1:
            return
        text = json.dumps(sorted(entries.items()))
        digests = self.by_consensus(phase, lambda: hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) > 1:
            each = self.by_consensus(f"{phase}, one by one,", lambda: dict(entries))
            check_alike(self.what, each, remedy)

    def bring_together(self, mine: Tensor) -> list[Tensor]:
        """All-gather the bytes of the ranks: return those of each, by rank. Blocks until all ranks
        have called it.
        """
        if self._side_channel is None:
            return [mine]
        self._side_channel.begin(self.what)
        return self._side_channel.gather(mine)

    def cancel(self, error: BaseException) -> None:
        """Make the thread that waits here for other ranks raise `error`. Any thread may call it."""
        if self._side_channel is not None:
            self._side_channel.leave(error)

    def leave(self) -> None:
        """End this rank's part. Idempotent. Ranks that still wait for it get an error. Any thread
        may call it.
        """
        if self._side_channel is not None:
            self._side_channel.leave()


# --- division of bytes ----------------------------------------------------------------------------


class TensorToSave(NamedTuple):
    """A tensor to be saved. own: the byte ranges of it that this rank writes, and no other rank
    does; None: all ranks hold the tensor, and each writes a share.
    """

    spec: TensorSpec
    own: tuple[Range, ...] | None = None


def divide(
    places: Mapping[str, TensorPlace],
    own: Mapping[str, Sequence[Range] | None],
    rank: int,
    count: int,
) -> dict[str, list[Range]]:
    """Return the byte ranges of each tensor of one file that `rank` of `count` writes. own: by
    name, as in `TensorToSave`.
    """
    shared = sorted((p.offset, p.nbytes, name) for name, p in places.items() if own[name] is None)
    found = {name: merged_ranges(ranges) for name, ranges in own.items() if ranges is not None}
    found |= {name: [] for _, _, name in shared}
    extents = [(offset, nbytes) for offset, nbytes, _ in shared]
    for at, begin, end in cut(extents, rank, count):
        offset, _, name = shared[at]
        found[name] = [(begin - offset, end - offset)]
    return found


def cut(extents: Sequence[Range], rank: int, count: int) -> list[tuple[int, int, int]]:
    """Return the share of `rank` in `extents` of a file, (offset, nbytes) pairs in ascending order:
    the index of each extent that the share has a part of, with the part's begin and end in the
    file.
    """
    ends = list(itertools.accumulate(nbytes for _, nbytes in extents))
    total = ends[-1] if ends else 0
    begin, end = (_bound(extents, ends, total * k // count, total) for k in (rank, rank + 1))
    found = []
    for number in range(bisect.bisect_right(ends, begin), len(extents)):
        offset, nbytes = extents[number]
        before = ends[number] - nbytes
        first, last = max(begin, before), min(end, ends[number])
        if before >= end:
            break
        if last > first:
            found.append((number, offset + first - before, offset + last - before))
    return found


def _bound(extents: Sequence[Range], ends: Sequence[int], at: int, total: int) -> int:
    """Round `at`, a position in the extents laid end to end, up to a block boundary of the file."""
    if at in (0, total):
        return at
    number = bisect.bisect_right(ends, at)
    offset, nbytes = extents[number]
    place = offset + at - (ends[number] - nbytes)
    place = -(-place // BLOCK_BYTES) * BLOCK_BYTES
    number = bisect.bisect_right(extents, (place, place)) - 1  # the last that begins before it
    offset, nbytes = extents[number]
    return ends[number] - nbytes + min(place - offset, nbytes)


def merged_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges in order; those that touch or overlap are merged, empty ones left out."""
    found: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def within(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """Return the parts of `ranges`, which are sorted and disjoint, that lie in [begin, end)."""
    at = max(0, bisect.bisect_right(ranges, (begin, begin)) - 1)
    upto = bisect.bisect_left(ranges, (end, end))
    found = ((max(first, begin), min(last, end)) for first, last in ranges[at:upto])
    return [(first, last) for first, last in found if first < last]


def share_of(sizes: Sequence[int], rank: int, count: int) -> range:
    """Return the indices of the parts that `rank` of `count` takes, so that all ranks take about
    the same number of bytes, and each part is taken once.
    """
    total = sum(sizes)
    ends = list(itertools.accumulate(sizes))
    bounds = [bisect.bisect_left(ends, -(-total * k // count)) for k in (rank, rank + 1)]
    return range(0 if rank == 0 else bounds[0], len(sizes) if rank == count - 1 else bounds[1])


def in_files(items: Iterable[T], nbytes_of: Callable[[T], int], most_bytes: int) -> list[list[T]]:
    """Divide the items, in their order, into files of at most `most_bytes`, unless one alone has
    more.
    """
    found: list[list[T]] = []
    nbytes = 0
    for item in items:
        if not found or nbytes + nbytes_of(item) > most_bytes:
            found.append([])
            nbytes = 0
        found[-1].append(item)
        nbytes += nbytes_of(item)
    return found
