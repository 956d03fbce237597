"""Memory for bytes on their way: pieces of one size, page-aligned, given out and taken back.

The last one that came back goes out first, so a small save touches few of them. Forked children do
not inherit the memory: the kernel would copy pages under running writes. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import NamedTuple

from offload.storage.buffers import Buffer


class IoBuffer(NamedTuple):
    """A piece of memory. `view` shows its bytes and keeps them."""

    address: int
    view: memoryview

    def buffer(self, nbytes: int) -> Buffer:
        return Buffer(self.address, nbytes, self.view)


class IoBuffers:
    def __init__(self, each_bytes: int, count: int, grows: bool = False) -> None:
        """grows: when all are out, there are `count` more."""
        self.each_bytes, self._count, self._grows = each_bytes, count, grows
        self._free: list[IoBuffer] = []
        self.nbytes = 0
        self._add()

    def _add(self) -> None:
        area = mmap.mmap(-1, self.each_bytes * self._count)
        with contextlib.suppress(OSError, AttributeError):
            area.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError, AttributeError):  # fewer pieces for the drive
            area.madvise(mmap.MADV_HUGEPAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
        view = memoryview(area)
        for number in reversed(range(self._count)):
            at = number * self.each_bytes
            self._free.append(IoBuffer(begin + at, view[at : at + self.each_bytes]))
        self.nbytes += self.each_bytes * self._count

    def take(self) -> IoBuffer | None:
        if not self._free and self._grows:
            self._add()
        return self._free.pop() if self._free else None

    def give_back(self, buffer: IoBuffer) -> None:
        self._free.append(buffer)
