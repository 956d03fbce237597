"""The partition of a block of bytes into equal shards, one per rank. Pure arithmetic.

Shards begin at multiples of 64 bytes: a shard of an aligned block is aligned, and no element lies
in two. All shards have the same size; the last ones may be padding, in part or whole.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGN_BYTES = 64


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
