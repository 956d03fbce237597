"""A best-fit allocator over integers: which extents of a range are free, and which are taken.

The host pool allocates its arena with it, and the disk store its files. It touches no memory and no
files. Not thread-safe: the owner holds its own lock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import cast

from offload.core.errors import StateError


@dataclass
class Extents:
    """The range [0, capacity), divided into taken and free extents at multiples of `align`.

    Best fit: the smallest free extent that is large enough, lowest first, so that large extents
    stay whole. Adjacent free extents are always merged. Sizes are rounded up to `align` and no
    further. A change that a signal handler interrupts is done or not done, never half; `is_taken`
    tells which.
    """

    capacity: int
    align: int = 1
    _free: list[tuple[int, int]] = field(init=False)  # (begin, size), by begin
    _taken: dict[int, int] = field(init=False, default_factory=dict)  # begin -> size
    used: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.capacity < 0 or self.align < 1 or self.capacity % self.align:
            raise StateError(f"extents: capacity {self.capacity} is not a multiple of {self.align}")
        self._count_again()

    def find(self, size: int) -> int | None:
        """Return the begin of the free extent to take `size` from; None if no extent fits."""
        if size < 1:
            raise StateError(f"extents: expected a size from 1 on, got {size}")
        fitting = [(have, begin) for begin, have in self._free if have >= size]
        return min(fitting)[1] if fitting else None

    def take_at(self, begin: int, size: int) -> None:
        """Take the first `size` of the free extent that starts at `begin`."""
        size = -(-size // self.align) * self.align
        place = bisect_left(self._free, (begin,))
        found, have = self._free[place]
        assert found == begin and have >= size
        try:
            self._taken[begin] = size
            self._free[place : place + 1] = [(begin + size, have - size)] if have > size else []
            self.used += size
        except BaseException:
            self._taken.pop(begin, None)
            self._count_again()
            raise

    def give_back(self, begin: int) -> None:
        """Free the taken extent that starts at `begin`, and merge it with its free neighbours."""
        if begin not in self._taken:
            raise StateError(f"extents: nothing is taken at {begin}")
        try:
            size = self._taken.pop(begin)
            self.used -= size
            first = last = bisect_left(self._free, (begin,))
            if last < len(self._free) and self._free[last][0] == begin + size:
                size += self._free[last][1]
                last += 1
            if first > 0 and sum(self._free[first - 1]) == begin:
                first -= 1
                begin, before = self._free[first]
                size += before
            self._free[first:last] = [(begin, size)]
        except BaseException:
            self._count_again()
            raise

    def _count_again(self) -> None:
        """Rebuild all else from `_taken`, which makes the tables consistent after an interrupt."""
        free, end = [], 0
        for begin, size in [*sorted(self._taken.items()), (self.capacity, 0)]:
            if begin > end:
                free.append((end, begin - end))
            end = begin + size
        self._free = free
        self.used = sum(self._taken.values())

    def is_taken(self, begin: int) -> bool:
        """Return whether a taken extent starts at `begin`."""
        return begin in self._taken

    @property
    def largest_free(self) -> int:
        return max((size for _, size in self._free), default=0)


def best_extents() -> type[Extents]:
    """Return the native core's class, or else Python's. Each change of either is atomic, also when
    a signal handler raises.
    """
    try:
        from offload import _native
    except ImportError:
        return Extents
    return cast("type[Extents]", _native.Extents)
