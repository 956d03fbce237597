"""Helpers for the tests of the store: odd memory, direct reads and writes of swap files, counts of
leaks.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.core.errors import ConfigError, StateError
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.choose import ENGINES
from offload.storage.disk import DiskStore, _Operation, check_request
from offload.storage.engine import Fault, FaultKind, Priority
from offload.storage.growing import GrowingStore
from offload.storage.space import Version

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
    """Return memory whose address is `shift` behind a multiple of the page size, with a page of
    slack behind it.
    """
    area = np.frombuffer(mmap.mmap(-1, shift + nbytes + BLOCK), dtype=np.uint8)
    return area[shift : shift + nbytes]


class PinningStore(DiskStore):
    """A disk store whose generations can be seen and held, as a long read of them would."""

    def generation_of(self, name: str) -> int:
        self.engine.check_usable()
        with self._lock:
            return self._table.version(name).generation

    def snapshot(self, names: Iterable[str] | None = None) -> PinnedVersions:
        self.engine.check_usable()
        with self._lock:
            self._table.take_in()
            wanted = list(self._table.current) if names is None else list(names)
            versions = {name: self._table.version(name) for name in wanted}
            for version in versions.values():
                version.holders += 1
        return PinnedVersions(self, versions)


class PinnedVersions:
    """Current generations of a store that stay readable until `release`."""

    def __init__(self, store: PinningStore, versions: dict[str, Version]) -> None:
        self.generations = {name: version.generation for name, version in versions.items()}
        self._store, self._versions = store, versions
        self._release = weakref.finalize(self, _unpin, store, list(versions.values()))
        self._release.atexit = False

    def read(self, name: str, target: Any, priority: Any = Priority.PREFETCH) -> Ticket[None]:
        store = self._store
        ticket: Ticket[None] = Ticket(f"read of {name}", store._describe)
        priority = check_request(name, priority)
        operation = _Operation(ticket, priority, store=store, name=name, is_write=False)
        memory = Buffer.of(name, target, True, store._anonymous)
        store.engine.check_usable()
        if not self._release.alive or name not in self._versions:
            why = f"without {name!r}" if self._release.alive else "released"
            raise StateError(f"snapshot: {why}")
        version = self._versions[name]
        if memory.nbytes != version.nbytes:
            raise ConfigError(
                f"{name}: expected a target of {version.nbytes} bytes as stored, got "
                f"{memory.nbytes}"
            )

        def begin(operation: _Operation, _: Buffer) -> None:
            version.holders += 1
            operation.version = version

        return store._operate(operation, memory, begin)

    def release(self) -> None:
        self._release()

    def __enter__(self) -> PinnedVersions:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _unpin(store: PinningStore, versions: list[Version]) -> None:
    with store._lock:
        for version in versions:
            store._table._let_go(version)


def chunks_of(store: GrowingStore) -> int:
    return sum(each.stats().chunks for each in list(store._stores))


def is_direct(store: DiskStore) -> bool:
    """Return whether all swap files have direct I/O: past the page cache."""
    return all(file.align > 1 for file in store._files)


def sync(store: DiskStore) -> None:
    """Sync the swap files to their drives."""
    for file in store._files:
        os.fsync(file.fd)


def open_store(directory: Path | str | list[Path], engine: str, **options: Any) -> PinningStore:
    options.setdefault("capacity_bytes", 4 * MIB)
    options.setdefault("timeout_s", 20.0)
    return PinningStore(directory, engine=engine, **options)


def write(store: Any, name: str, data: Bytes) -> None:
    store.write(name, data).wait(HANG_S)


def nbytes_of(store: Any, name: str) -> int:
    if isinstance(store, DiskStore):
        return store._table.version(name).nbytes
    return int(store.nbytes_of(name))


def read(store: Any, name: str) -> Bytes:
    """Return the bytes that are stored as `name`; raise the error of reading them."""
    target = np.empty(nbytes_of(store, name), dtype=np.uint8)
    store.read(name, target).wait(HANG_S)
    return target


@contextmanager
def opened(store: DiskStore, file: int = 0) -> Iterator[int]:
    """Open a swap file a second time, through the page cache."""
    fd = os.open(f"/proc/self/fd/{store._files[file].fd}", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def places(store: DiskStore, name: str) -> list[tuple[int, int, int]]:
    """Return file, begin and bytes of each extent of a chunk."""
    return [(e.file, e.begin, e.nbytes) for e in store._table.current[name].extents]


def peek(store: DiskStore, file: int, offset: int, nbytes: int) -> bytes:
    with opened(store, file) as fd:
        return os.pread(fd, nbytes, offset)


def poke(store: DiskStore, file: int, offset: int, data: bytes) -> None:
    with opened(store, file) as fd:
        assert os.pwrite(fd, data, offset) == len(data)


def flip_bit(store: DiskStore, name: str, bit: int) -> None:
    """Flip one bit of a chunk in its file; a second call restores it."""
    for file, begin, nbytes in places(store, name):
        if bit < 8 * nbytes:
            (byte,) = peek(store, file, begin + bit // 8, 1)
            poke(store, file, begin + bit // 8, bytes([byte ^ 1 << bit % 8]))
            return
        bit -= 8 * nbytes
    raise AssertionError("the chunk is shorter")


def until(condition: Callable[[], bool], what: str = "it") -> None:
    """Wait until the condition holds; fail after `HANG_S`, which means that it never will."""
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
    """Check that no file and no thread outlives the block."""
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
    """A Python thread that counts as fast as it can: it shows whether other code holds the GIL."""

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
    """A lock that sleeps after a thread of the engine has released it, longer than a waiting writer
    sleeps between two looks, so that other threads can take it.
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
