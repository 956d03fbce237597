"""The allocator of swap files: which extents are taken, and which file has the shortest queue.

A request is split over several free extents when no single one is large enough, so that it
succeeds whenever enough bytes are free in all. Not thread-safe: the store holds its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from offload.core.config import format_size
from offload.core.extents import Extents
from offload.storage.files import BLOCK_BYTES, SwapFile


class Extent(NamedTuple):
    """A taken run of a file; `nbytes` of it are used, the rest fills its last block."""

    file: int  # the file's number
    begin: int
    nbytes: int


def best_extents() -> type[Extents]:
    """Return the native core's class, or else Python's. Each change of either is atomic, also when
    a signal handler raises.
    """
    try:
        from offload import _native
    except ImportError:
        return Extents
    return cast("type[Extents]", _native.Extents)


class Space:
    """The allocator of one or several swap files.

    extents: the class of each file's list; None: the native core's, or else Python's.
    """

    def __init__(self, files: Sequence[SwapFile], extents: type[Extents] | None = None) -> None:
        align = max(BLOCK_BYTES, *(file.align for file in files))
        kind = extents or best_extents()
        self._extents = [kind(file.nbytes - file.nbytes % align, align) for file in files]
        self._align = align
        self._files = range(len(files))
        self.waiting_bytes = [0] * len(files)  # of operations that have not ended
        self.capacity_bytes = sum(extents.capacity for extents in self._extents)
        self.peak_bytes = 0

    def take(self, nbytes: int, found: list[Extent]) -> bool:
        """Take room for `nbytes` in the file with the shortest queue and put its extents into
        `found`, which is empty; return False when there is not enough.

        When a signal handler raises meanwhile, nothing is taken, or all of it is in `found`: no
        extent is lost on the way to the caller.
        """
        if nbytes == 0:
            return True
        try:
            if not self._take_whole(nbytes, found) and not self._take_pieces(nbytes, found):
                return False
        except BaseException:
            self._undo(found)
            raise
        used_bytes = self.used_bytes
        if used_bytes > self.peak_bytes:
            self.peak_bytes = used_bytes
        return True

    def _by_queue(self) -> Sequence[int]:
        """Sort the files by the bytes in flight, the fewest first; of equals the emptier first."""
        if len(self._files) == 1:
            return self._files
        return sorted(
            self._files, key=lambda file: (self.waiting_bytes[file], self._extents[file].used)
        )

    def _take_whole(self, nbytes: int, found: list[Extent]) -> bool:
        for file in self._by_queue():
            extents = self._extents[file]
            begin = extents.find(nbytes)
            if begin is not None:
                found.append(Extent(file, begin, nbytes))  # before `take_at`: see _undo
                extents.take_at(begin, nbytes)
                return True
        return False

    def _take_pieces(self, nbytes: int, found: list[Extent]) -> bool:
        if self.round_up(nbytes) > self.capacity_bytes - self.used_bytes:
            return False
        for file in self._by_queue():
            extents = self._extents[file]
            while nbytes and (largest := extents.largest_free):
                part = min(largest, nbytes)
                begin = extents.find(part)
                assert begin is not None
                found.append(Extent(file, begin, part))
                extents.take_at(begin, part)
                nbytes -= part
        assert nbytes == 0
        return True

    def _undo(self, found: list[Extent]) -> None:
        """Free what an interrupted call has taken: every extent in `found`, but perhaps the last.
        If that place is taken, this call took it: it was free when the call looked.
        """
        for extent in found:
            if self._extents[extent.file].is_taken(extent.begin):
                self._extents[extent.file].give_back(extent.begin)
        found.clear()

    def give_back(self, extents: Sequence[Extent]) -> None:
        for file, begin, _ in extents:
            self._extents[file].give_back(begin)

    def refusal(self, name: str, nbytes: int) -> str:
        """Say why there is no room for `name`, with the numbers."""
        free = self.capacity_bytes - self.used_bytes
        return (
            f"disk store: {name} needs {format_size(nbytes)} ({nbytes} bytes), {format_size(free)} "
            f"({free} bytes) of {format_size(self.capacity_bytes)} are free; a new generation "
            "lies beside the old one until it is complete, and background saves keep old ones: "
            "wait for the ticket of a save before the next one, or keep more in host_memory"
        )

    def round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._align) * self._align

    @property
    def used_bytes(self) -> int:
        used = 0
        for extents in self._extents:  # a loop is faster than `sum`: this runs for every write
            used += extents.used
        return used

    def used_bytes_of(self, file: int) -> int:
        return self._extents[file].used
