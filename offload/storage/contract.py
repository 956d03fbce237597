"""The contract of the store: what it promises, its figures, and the check of a request.

A store holds chunks of bytes by name. A write makes a new generation beside the old one, which
stays readable until the new one is complete, and stays current if the write fails. A read yields
the generation that is the latest complete one at the time of the call, or an error, never other
bytes. Names are those of tensors, since errors quote them. Any thread may call a store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.core.errors import ConfigError
from offload.storage.engine import SUM_BYTES, Priority

KnownSums: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True)
class DirectoryStats:
    """The bytes held in one directory, and those moved there since the store was opened."""

    path: str
    capacity_bytes: int
    used_bytes: int
    read_bytes: int
    written_bytes: int  # wear of the drive
    direct: bool  # direct I/O: past the page cache


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
    directories: tuple[DirectoryStats, ...] = field(default=())

    @property
    def read_bytes(self) -> int:
        return sum(directory.read_bytes for directory in self.directories)

    @property
    def written_bytes(self) -> int:
        return sum(directory.written_bytes for directory in self.directories)


def check_request(name: object, priority: object) -> Priority:
    """Return `priority` as a `Priority`; raise a `ConfigError` where it or the name is invalid."""
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
    """Raise a `ConfigError` unless `sums` has the form of the checksums of `nbytes` bytes."""
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
