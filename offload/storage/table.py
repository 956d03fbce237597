"""The table of a disk store: the current generation of each chunk, and the refcounts of old ones.

A generation keeps its extents until it is neither current nor being read. Not thread-safe: the
store holds its lock. Only `freed` is appended to without the lock, by finalizers, perhaps in the
very thread that holds it. The next call that holds the lock completes that with `take_in`.
"""

from __future__ import annotations

import errno
from collections import deque

from offload.core.errors import OffloadError, StateError, StoreTimeout
from offload.storage.engine import Sums
from offload.storage.space import Extent, Space


class Version:
    """A generation of a chunk. holders: its refcount, by the table and operations."""

    __slots__ = ("extents", "generation", "holders", "is_stuck", "name", "nbytes", "sums")

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.generation = 0  # 0: its write is not begun
        self.extents: list[Extent] = []
        self.sums: list[Sums] = []  # the checksums of each extent
        self.holders = 1
        self.is_stuck = False  # an operation on it may never end


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
            raise StateError(self._unknown(name))
        return version

    def check_known(self, name: str) -> None:
        if name not in self.current and name not in self.writing:
            raise StateError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        hint = " (its first write is not done)" if name in self.writing else ""
        return f"store: nothing is stored as {name!r}{hint}; {len(self.current)} chunks are stored"

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
