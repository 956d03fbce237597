"""Gauges of memory: the bytes that a pool, a store or this process holds now."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Stats(Protocol):
    @property
    def used_bytes(self) -> int: ...


class _Measurable(Protocol):
    def stats(self) -> _Stats: ...


def used_by(holder: _Measurable) -> Callable[[], int | None]:
    """Return a function that asks a pool or a store for its used bytes.

    The function has a weak reference to `holder`, and returns None once `holder` is collected.
    """
    there = weakref.ref(holder)

    def ask() -> int | None:
        found = there()
        return None if found is None else found.stats().used_bytes

    return ask


def resident_bytes() -> int | None:
    """Return the RSS of this process; None where the system does not report it."""
    pages = _pages()
    return None if pages is None else pages[0] * _PAGE_BYTES


def private_bytes() -> int | None:
    """Return the RSS of this process without file-backed pages and shared memory; None as above."""
    pages = _pages()
    return None if pages is None else (pages[0] - pages[1]) * _PAGE_BYTES


def resident_peak_bytes() -> int | None:
    """Return the peak of `resident_bytes` in the life of this process (VmHWM); None if unknown."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    return None


def _pages() -> tuple[int, int] | None:
    """Return the number of resident pages, and of the shared ones among them."""
    # Unbuffered: it is asked dozens of times a step, and a buffer costs half of the time.
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, _ = file.read(128).split(maxsplit=3)
        return int(resident), int(shared)
    return None
