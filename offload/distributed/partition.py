"""How a block of bytes is shared out over ranks: equal slices, one a rank. Pure numbers.

Slices begin at multiples of 64 bytes: a slice of an aligned block is aligned, and no element lies
in two. Every rank's has the same size; the last ones may be, in part or whole, padding.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Partition:
    """Of a block of `nbytes` over `count` ranks."""

    nbytes: int
    count: int

    def __post_init__(self) -> None:
        assert self.nbytes >= 0 and self.count >= 1, self

    @property
    def slice_bytes(self) -> int:
        """Of each rank, padding included."""
        each = -(-self.nbytes // self.count)
        return -(-each // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def padded_bytes(self) -> int:
        """Of all slices together."""
        return self.slice_bytes * self.count

    def span(self, rank: int) -> tuple[int, int]:
        """The bytes of the block that are a rank's; none, at the end, where it has only padding."""
        assert 0 <= rank < self.count, (rank, self)
        begin = min(rank * self.slice_bytes, self.nbytes)
        return begin, min(begin + self.slice_bytes, self.nbytes)

    def own(self, rank: int, begin: int, numel: int, itemsize: int) -> tuple[int, int]:
        """First and last (excluded) element that is a rank's, of a parameter of `numel` elements
        that begins at the byte `begin` of the block; (0, 0): none.
        """
        assert begin % itemsize == 0, (begin, itemsize)
        low, high = self.span(rank)
        first = max(0, -(-(low - begin) // itemsize))
        end = min(numel, -(-(high - begin) // itemsize))
        return (first, end) if first < end else (0, 0)
