"""What has happened, in numbers: counters, seconds by cause, and every fall-back by name.

The parts of the engine note things here while they run; `Report` reads a snapshot. Any thread;
cheap enough for every transfer and every chunk. Prints nothing and decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from offload.errors import StateError


@dataclass(frozen=True)
class Snapshot:
    """The numbers at one moment. `later - earlier` is what happened in between."""

    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    fallbacks: Mapping[str, str]  # what runs in a lesser way -> why

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        return Snapshot(
            MappingProxyType({k: v - earlier.counts.get(k, 0) for k, v in self.counts.items()}),
            MappingProxyType({k: v - earlier.seconds.get(k, 0.0) for k, v in self.seconds.items()}),
            self.fallbacks,
        )


@dataclass
class Metrics:
    """One set of numbers; each engine has its own. strict: a fall-back raises instead of being
    noted.
    """

    strict: bool = False
    _counts: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=dict)
    _fallbacks: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter; names carry their unit: `disk_read_bytes`, `prefetch_hits`."""
        with self._lock:
            self._counts[name] += amount

    @contextmanager
    def span(self, cause: str) -> Iterator[None]:
        """Add the time spent inside to `cause`, also when it ends with an exception."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - begin
            with self._lock:
                self._seconds[cause] = self._seconds.get(cause, 0.0) + elapsed_s

    def fall_back(self, what: str, why: str) -> None:
        """Note that `what` runs in a lesser way than it could. The first reason stays."""
        if self.strict:
            raise StateError(
                f"{what}: {why} (strict=True allows no fall-back; mend it, or set strict=False)"
            )
        with self._lock:
            self._fallbacks.setdefault(what, why)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(
                MappingProxyType(dict(self._counts)),
                MappingProxyType(dict(self._seconds)),
                MappingProxyType(dict(self._fallbacks)),
            )
