"""What every store promises; `DiskStore` and `MemoryStore` keep it.

A store holds chunks of bytes by name. A write makes a new generation beside the old one, which
stays readable until the new one is complete, and stays what it is if the write fails. A read gives
the latest complete generation at the time of the call, or an error, never other bytes. Names are
those of tensors: errors are full of them. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.core.errors import ConfigError
from offload.core.ticket import Ticket
from offload.storage.engine import SUM_BYTES, Priority

KnownSums: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True)
class DirectoryStats:
    """Bytes moved and kept in one directory since the store was opened."""

    path: str
    capacity_bytes: int
    used_bytes: int
    read_bytes: int
    written_bytes: int  # wear of the drive
    direct: bool  # past the page cache


@dataclass(frozen=True)
class StoreStats:
    """A store at one moment. `used_bytes`: taken from the capacity, for whatever reason."""

    engine: str
    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    quarantined_bytes: int  # never given back: an operation on them has not ended
    chunks: int
    directories: tuple[DirectoryStats, ...] = field(default=())

    @property
    def read_bytes(self) -> int:
        return sum(directory.read_bytes for directory in self.directories)

    @property
    def written_bytes(self) -> int:
        return sum(directory.written_bytes for directory in self.directories)


class StoreSnapshot(Protocol):
    """Chunks as they were when it was taken, whatever is written to the store later."""

    generations: Mapping[str, int]

    def read(
        self, name: str, target: Any, priority: Priority = Priority.PREFETCH
    ) -> Ticket[None]: ...

    def release(self) -> None:
        """Let the old generations go. Idempotent; also done by `with` and when forgotten."""

    def __enter__(self) -> StoreSnapshot: ...

    def __exit__(self, *exception: object) -> None: ...


class Store(Protocol):
    def write(
        self,
        name: str,
        source: Any,
        priority: Priority = Priority.WRITE_BACK,
        sums: KnownSums | None = None,
    ) -> Ticket[None]:
        """Store the bytes of `source`, which must not change, nor its storage be resized, before
        the ticket has ended. sums: what whoever made the bytes knows of their checksums, one for
        each `SUM_BYTES`, 0 for what is not known; a read is refused where they are others'.
        """

    def read(
        self, name: str, target: Any, priority: Priority = Priority.WAITED_FOR
    ) -> Ticket[None]:
        """Fill `target`, which has the length that was written; its bytes count only when the
        ticket has ended well, and its storage must not be resized before it has ended.
        """

    def free(self, name: str) -> None:
        """Forget the chunk, and every write of it that is under way."""

    def snapshot(self, names: Iterable[str] | None = None) -> StoreSnapshot:
        """Pin the current generation of `names` (all) until the snapshot is released."""

    def names(self) -> list[str]: ...

    def nbytes_of(self, name: str) -> int: ...

    def generation_of(self, name: str) -> int: ...

    def flush(self) -> None:
        """Return when the drives have taken all complete writes; a failure of that is final."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Give everything back. Idempotent."""


def check_request(name: object, priority: object) -> Priority:
    """The priority of a request, if it and the chunk's name are such."""
    if not isinstance(name, str):
        raise ConfigError(f"name: expected a string, got {type(name).__name__}")
    if isinstance(priority, Priority):
        return priority
    try:
        return Priority(priority)  # type: ignore[arg-type]
    except ValueError as error:
        known = ", ".join(f"Priority.{each.name}" for each in Priority)
        raise ConfigError(f"priority: expected one of {known}, got {priority!r}") from error


def check_sums(name: str, sums: object, nbytes: int) -> None:
    """Refuse what cannot be the known checksums of so many bytes."""
    if not isinstance(sums, np.ndarray) or sums.dtype != np.uint64 or sums.ndim != 1:
        got = (
            f"{sums.ndim} of {sums.dtype}" if isinstance(sums, np.ndarray) else type(sums).__name__
        )
        raise ConfigError(f"{name}: sums: expected an array of one dimension of uint64, got {got}")
    expected = -(-nbytes // SUM_BYTES)
    if len(sums) != expected:
        raise ConfigError(
            f"{name}: sums: expected {expected}, one for each {SUM_BYTES} of {nbytes} bytes, got "
            f"{len(sums)}"
        )
