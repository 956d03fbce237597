"""For the tests of the store: odd memory, direct looks into swap files, counts of what leaks."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.storage.choose import ENGINES
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind

__all__ = ["ENGINES"]

KIB = 1 << 10
MIB = 1 << 20
BLOCK = 4096
PIECE = 16 * KIB  # of stores that have to cut small chunks into several pieces
HANG_S = 60.0  # nothing takes that long, unless it hangs
PLUG_MS = 200  # for how long the first operation holds up a store of depth 1
Bytes = npt.NDArray[np.uint8]
HEALTHY = Fault(FaultKind.NONE)


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def memory_at(shift: int, nbytes: int) -> Bytes:
    """Memory whose address is `shift` behind a multiple of the page size; a guard page follows."""
    area = np.frombuffer(mmap.mmap(-1, shift + nbytes + BLOCK), dtype=np.uint8)
    return area[shift : shift + nbytes]


def open_store(directory: Path | str | list[Path], engine: str, **options: Any) -> DiskStore:
    options.setdefault("capacity_bytes", 4 * MIB)
    options.setdefault("timeout_s", 20.0)
    return DiskStore(directory, engine=engine, **options)


def write(store: Any, name: str, data: Bytes) -> None:
    store.write(name, data).wait(HANG_S)


def read(store: Any, name: str) -> Bytes:
    """What is stored as `name`, or the error of reading it."""
    target = np.empty(store.nbytes_of(name), dtype=np.uint8)
    store.read(name, target).wait(HANG_S)
    return target


@contextmanager
def opened(store: DiskStore, file: int = 0) -> Iterator[int]:
    """Another way to the bytes of a swap file, through the page cache."""
    fd = os.open(f"/proc/self/fd/{store._files[file].fd}", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def places(store: DiskStore, name: str) -> list[tuple[int, int, int]]:
    """File, begin and bytes of each extent of a chunk."""
    return [(e.file, e.begin, e.nbytes) for e in store._table.current[name].extents]


def peek(store: DiskStore, file: int, offset: int, nbytes: int) -> bytes:
    with opened(store, file) as fd:
        return os.pread(fd, nbytes, offset)


def poke(store: DiskStore, file: int, offset: int, data: bytes) -> None:
    with opened(store, file) as fd:
        assert os.pwrite(fd, data, offset) == len(data)


def flip_bit(store: DiskStore, name: str, bit: int) -> None:
    """Spoil one bit of a chunk in its file; again: mend it."""
    for file, begin, nbytes in places(store, name):
        if bit < 8 * nbytes:
            (byte,) = peek(store, file, begin + bit // 8, 1)
            poke(store, file, begin + bit // 8, bytes([byte ^ 1 << bit % 8]))
            return
        bit -= 8 * nbytes
    raise AssertionError("the chunk is shorter")


def until(condition: Callable[[], bool], what: str = "it") -> None:
    """Wait for something that comes soon, for a time that can only mean that it never does."""
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come"
        time.sleep(0.002)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def system_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No file and no thread outlives the block."""
    gc.collect()
    files, threads = open_files(), system_threads()
    yield
    gc.collect()
    until(lambda: open_files() <= files, "the end of open files")
    until(lambda: system_threads() <= threads, "the end of threads")


def plug(store: DiskStore, data: Bytes) -> Any:
    """Hold up a store of depth 1 for a moment: all that is submitted now waits in its queue."""
    store.engine.inject(Fault(FaultKind.DELAY, nth=1, code=PLUG_MS))
    ticket = store.write("plug", data)
    until(lambda: store.engine.attempts() == 1, "the plug")
    return ticket


class Counter:
    """A Python thread that counts as fast as it can: whether anybody lets it."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.count += 1

    def __enter__(self) -> Counter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


class SlowLock:
    """A lock that leaves others much time when a thread of the engine's has let go of it: more than
    a waiting writer sleeps between two looks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caller = threading.get_ident()
        self.acquire = self._lock.acquire

    def release(self) -> None:
        self._lock.release()
        if threading.get_ident() != self._caller:
            threading.Event().wait(0.08)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
