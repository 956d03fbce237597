"""A pool of buffers for bytes in flight: all of one size, and page-aligned.

The buffer that was given back last is taken first, so a small save touches few of them. Forked
children do not inherit the memory: the kernel would copy pages under running writes. Not
thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import NamedTuple

from offload.storage.buffers import Buffer


class IoBuffer(NamedTuple):
    """A buffer of the pool. `view` shows its bytes and keeps their memory alive."""

    address: int
    view: memoryview

    def buffer(self, nbytes: int) -> Buffer:
        return Buffer(self.address, nbytes, self.view)


class IoBuffers:
    """A pool of buffers of `each_bytes`."""

    def __init__(self, each_bytes: int, count: int, grows: bool = False) -> None:
        """Take the memory for `count` buffers. grows: when all of them are taken, `count` more are
        added; otherwise `take` returns None.
        """
        self.each_bytes, self._count, self._grows = each_bytes, count, grows
        self._free: list[IoBuffer] = []
        self.nbytes = 0
        self._add()

    def _add(self) -> None:
        area = mmap.mmap(-1, self.each_bytes * self._count)
        with contextlib.suppress(OSError, AttributeError):
            area.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError, AttributeError):  # fewer segments for the drive
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
