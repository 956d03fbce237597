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


class _Holder(Protocol):
    def stats(self) -> _Stats: ...


def used_by(holder: _Holder, besides_bytes: int = 0) -> Callable[[], int | None]:
    """Asks a pool or a store as long as it is there; it is not held. besides_bytes: in use on the
    same tier, always.
    """
    there = weakref.ref(holder)

    def ask() -> int | None:
        found = there()
        return None if found is None else found.stats().used_bytes + besides_bytes

    return ask


def resident_bytes() -> int | None:
    """Of this process, as the system counts them; None where it does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return None
