"""Faults for tests: file system calls outside of the engines that fail as planned. Faults of the
engines' own operations are injected there (`IOEngine.inject`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from offload.storage.files import System


@dataclass
class FaultySystem(System):
    """A `System` whose `nth` call (from 1) of one kind fails with `code`; with `forever` all from
    then on.
    """

    call: str  # "open", "reserve", "write" or "sync"
    code: int
    nth: int = 1
    forever: bool = False
    calls: int = field(default=0, init=False)

    def open_unnamed(self, directory: Path) -> tuple[int, bool]:
        self._count("open")
        return super().open_unnamed(directory)

    def reserve(self, fd: int, nbytes: int, begin: int = 0) -> None:
        self._count("reserve")
        super().reserve(fd, nbytes, begin)

    def write(self, fd: int, data: memoryview, begin: int) -> int:
        self._count("write")
        return super().write(fd, data, begin)

    def sync(self, fd: int) -> None:
        self._count("sync")
        super().sync(fd)

    def _count(self, call: str) -> None:
        if call != self.call:
            return
        self.calls += 1
        if self.calls == self.nth or (self.forever and self.calls > self.nth):
            raise OSError(self.code, os.strerror(self.code))
