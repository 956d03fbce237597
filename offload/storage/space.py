"""The space of a disk store: which extents of its swap files are taken, which chunks have them, and
its figures.

A generation of a chunk keeps its extents until it is neither current nor being read. Not
thread-safe: the store holds its lock. Only `freed` is appended to without the lock, by finalizers,
perhaps in the very thread that holds it. The next call that holds the lock completes that with
`take_in`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.core.config import format_size
from offload.core.errors import OffloadError, StateError, StoreTimeout
from offload.core.extents import Extents, best_extents
from offload.storage.engine import Sums
from offload.storage.files import BLOCK_BYTES, SwapFile


@dataclass(frozen=True)
class StoreStats:
    """The figures of a store at one moment.

    used_bytes: all that is taken from the capacity, quarantined bytes and old generations included.
    """

    engine: str
    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    quarantined_bytes: int  # never freed: an operation on them timed out and has not ended
    chunks: int
    read_bytes: int = 0  # since the store was opened
    written_bytes: int = 0


class Extent(NamedTuple):
    """A taken run of a file; `nbytes` of it are used, the rest fills its last block."""

    file: int  # the file's number
    begin: int
    nbytes: int


class Space:
    """The allocator of one or several swap files: which extents are taken, and which file has the
    shortest queue.

    A request is split over several free extents when no single one is large enough, so that it
    succeeds whenever enough bytes are free in all.

    extents: the class of each file's list; None: the native core's, or else Python's.
    """

    def __init__(self, files: Sequence[SwapFile], extents: type[Extents] | None = None) -> None:
        align = max(BLOCK_BYTES, *(file.align for file in files))
        kind = extents or best_extents()
        self.extents = [kind(file.nbytes - file.nbytes % align, align) for file in files]
        self._align = align
        self._files = range(len(files))
        self.waiting_bytes = [0] * len(files)  # of operations that have not ended
        self.capacity_bytes = sum(extents.capacity for extents in self.extents)
        self.peak_bytes = 0

    def take(self, nbytes: int, found: list[Extent]) -> bool:
        """Take room for `nbytes` in the file with the shortest queue and put its extents into
        `found`, which is empty; return False when there is not enough.

        When a signal handler raises meanwhile, nothing is taken, or all of it is in `found`: no
        extent is lost on the way to the caller.
        """
        if nbytes == 0:
            return True
        order: Sequence[int] = self._files
        if len(order) > 1:  # by the bytes in flight, the fewest first; of equals the emptier first
            order = sorted(order, key=lambda n: (self.waiting_bytes[n], self.extents[n].used))
        try:
            for file in order:
                begin = self.extents[file].find(nbytes)
                if begin is not None:
                    found.append(Extent(file, begin, nbytes))  # before `take_at`: see _undo
                    self.extents[file].take_at(begin, nbytes)
                    break
            else:
                if not self._take_pieces(nbytes, order, found):
                    return False
        except BaseException:
            self._undo(found)
            raise
        used_bytes = self.used_bytes
        if used_bytes > self.peak_bytes:
            self.peak_bytes = used_bytes
        return True

    def _take_pieces(self, nbytes: int, order: Sequence[int], found: list[Extent]) -> bool:
        if self.round_up(nbytes) > self.capacity_bytes - self.used_bytes:
            return False
        for file in order:
            extents = self.extents[file]
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
            if self.extents[extent.file].is_taken(extent.begin):
                self.extents[extent.file].give_back(extent.begin)
        found.clear()

    def give_back(self, extents: Sequence[Extent]) -> None:
        for file, begin, _ in extents:
            self.extents[file].give_back(begin)

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
        for extents in self.extents:  # a loop is faster than `sum`: this runs for every write
            used += extents.used
        return used


@dataclass(slots=True, eq=False)
class Version:
    """A generation of a chunk. holders: its refcount, by the table and operations."""

    name: str
    nbytes: int
    generation: int = 0  # 0: its write is not begun
    extents: list[Extent] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)  # the checksums of each extent
    holders: int = 1
    is_stuck: bool = False  # an operation on it may never end


class ChunkTable:
    """A table of chunks by name, whose extents are in `space`."""

    def __init__(self, space: Space) -> None:
        self.current: dict[str, Version] = {}
        self.writing: dict[str, list[int]] = {}  # generations whose writes are in flight
        self.freed_at: dict[str, int] = {}  # writes up to this generation are discarded
        self.quarantined_bytes = 0
        self._space = space
        self.generation = 0  # the latest
        self.freed: deque[tuple[str, int]] = deque()  # names, each up to a generation

    def version(self, name: str) -> Version:
        """Return the current generation of `name`; raise `StateError` if there is none."""
        self.take_in()
        version = self.current.get(name)
        if version is None:
            raise self.unknown(name)
        return version

    def unknown(self, name: str) -> StateError:
        hint = " (its first write is not done)" if name in self.writing else ""
        return StateError(
            f"store: nothing is stored as {name!r}{hint}; {len(self.current)} chunks are stored"
        )

    # --- writes -----------------------------------------------------------------------------------

    def begin(self, version: Version) -> None:
        """Number `version` as the latest generation, before its write starts."""
        self.generation += 1
        version.generation = self.generation
        self.writing.setdefault(version.name, []).append(version.generation)

    def end(self, version: Version, error: OffloadError | None) -> None:
        """Make `version` current after its write, or drop it if the write failed, perhaps before it
        began, if the chunk was freed meanwhile, or if a later write has ended first.
        """
        name, generation, freed_at = version.name, version.generation, 0
        if self.freed_at:
            freed_at = self.freed_at.get(name, 0)
        under_way = self.writing.get(name)
        if under_way is not None:
            if generation in under_way:  # else it was interrupted before `begin`
                under_way.remove(generation)
            if not under_way:
                del self.writing[name]
                self.freed_at.pop(name, None)
        current = self.current.get(name)
        if error is not None:
            self.let_go_after(version, error)
        elif generation <= freed_at or (current is not None and generation < current.generation):
            self._let_go(version)  # freed meanwhile, or a later write has ended first
        else:
            self.current[name] = version
            if current is not None:
                self._let_go(current)

    # --- refcounts --------------------------------------------------------------------------------

    def let_go_after(self, version: Version, error: OffloadError | None) -> None:
        """Drop the hold of an operation that has ended or could not be started. After a time-out
        put the version's bytes in quarantine instead.
        """
        if not isinstance(error, StoreTimeout) or error.errno != errno.ETIMEDOUT:
            self._let_go(version)
        elif not version.is_stuck:
            # The drive may still write or read there one day: the hold is never dropped.
            version.is_stuck = True
            self.quarantined_bytes += sum(self._space.round_up(e.nbytes) for e in version.extents)

    def _let_go(self, version: Version) -> None:
        version.holders -= 1
        assert version.holders >= 0
        if version.holders == 0:
            self._space.give_back(version.extents)

    def take_in(self) -> None:
        """Complete what was freed without the lock. The caller holds the lock."""
        while self.freed:
            name, generation = self.freed.popleft()
            if name in self.writing:
                self.freed_at[name] = generation
            version = self.current.get(name)
            if version is not None and version.generation <= generation:
                del self.current[name]
                self._let_go(version)
