"""Room in swap files: which bytes of which file are taken, and which file has the shortest queue.

A request is cut over several free pieces when no single one is large enough, so that it can always
be met while enough bytes are free in all. Not thread-safe: the store has a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.extents import Extents
from offload.store.files import BLOCK_BYTES, SwapFile


@dataclass(frozen=True)
class Extent:
    """A taken piece of a file; `nbytes` of it are used, the rest fills its last block."""

    file: int  # its number
    begin: int
    nbytes: int


class Space:
    def __init__(self, files: Sequence[SwapFile]) -> None:
        align = max(BLOCK_BYTES, *(file.align for file in files))
        self._extents = [Extents(file.nbytes - file.nbytes % align, align) for file in files]
        self._align = align
        self.waiting_bytes = [0] * len(files)  # of operations that have not ended
        self.capacity_bytes = sum(extents.capacity for extents in self._extents)
        self.peak_bytes = 0

    def take(self, nbytes: int) -> list[Extent] | None:
        """Room for `nbytes`, where the queue is shortest; None when there is not enough."""
        if nbytes == 0:
            return []
        found = self._take_whole(nbytes) or self._take_pieces(nbytes)
        if found is not None:
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return found

    def _by_queue(self) -> list[int]:
        """Files, the one with the least to do first; of equals the emptier one."""
        files = range(len(self._extents))
        return sorted(files, key=lambda file: (self.waiting_bytes[file], self._extents[file].used))

    def _take_whole(self, nbytes: int) -> list[Extent] | None:
        for file in self._by_queue():
            begin = self._extents[file].take(nbytes)
            if begin is not None:
                return [Extent(file, begin, nbytes)]
        return None

    def _take_pieces(self, nbytes: int) -> list[Extent] | None:
        if self.round_up(nbytes) > self.capacity_bytes - self.used_bytes:
            return None
        found: list[Extent] = []
        try:
            for file in self._by_queue():
                while nbytes and (largest := self._extents[file].largest_free):
                    part = min(largest, nbytes)
                    begin = self._extents[file].take(part)
                    assert begin is not None
                    found.append(Extent(file, begin, part))
                    nbytes -= part
        except BaseException:
            self.give_back(found)
            raise
        assert nbytes == 0
        return found

    def give_back(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._extents[extent.file].give_back(extent.begin)

    def round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._align) * self._align

    @property
    def used_bytes(self) -> int:
        return sum(extents.used for extents in self._extents)

    def used_bytes_of(self, file: int) -> int:
        return self._extents[file].used
