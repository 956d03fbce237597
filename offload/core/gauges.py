"""How many bytes something holds, for samples of memory over time."""

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
    """Asks a pool or a store as long as it is there; it is not held."""
    there = weakref.ref(holder)

    def ask() -> int | None:
        found = there()
        return None if found is None else found.stats().used_bytes

    return ask


def resident_bytes() -> int | None:
    """Of this process, as the system counts them; None where it does not tell."""
    pages = _pages()
    return None if pages is None else pages[0] * _PAGE_BYTES


def private_bytes() -> int | None:
    """The same without pages of files and of memory that is shared."""
    pages = _pages()
    return None if pages is None else (pages[0] - pages[1]) * _PAGE_BYTES


def resident_peak_bytes() -> int | None:
    """Most that `resident_bytes` ever was."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    return None


def _pages() -> tuple[int, int] | None:
    """That are resident, and those of them that are shared."""
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        _, resident, shared, _ = file.read().split(maxsplit=3)
        return int(resident), int(shared)
    return None
