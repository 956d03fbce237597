"""A store in host memory with the contract of the disk store: the reference for its tests."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.core.budget import HOST, Budget
from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.locks import attempt
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.disk import check_request, check_sums
from offload.storage.engine import KnownSums, Priority
from offload.storage.space import StoreStats

Bytes = npt.NDArray[np.uint8]


class MemoryStore:
    """A store in host memory of at most `capacity_bytes`, including the old generations that
    snapshots pin, and the one that a write replaces until the write is complete.
    """

    def __init__(self, capacity_bytes: int, budget: Budget = HOST) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes: expected 1 or more, got {capacity_bytes}")
        share = budget.take(capacity_bytes, "memory store")
        self._give_back = weakref.finalize(self, share.release)
        self._capacity_bytes = capacity_bytes
        self._chunks: dict[str, tuple[int, Bytes]] = {}  # generation and bytes
        self._generation = 0
        self._snapshots: weakref.WeakSet[MemorySnapshot] = weakref.WeakSet()
        self._peak_bytes = 0
        self._lock = threading.Lock()
        # Names freed while the lock was held, up to a generation: a finalizer may run in the thread
        # that holds it.
        self._freed: deque[tuple[str, int]] = deque()
        self._closed = False

    def write(
        self,
        name: str,
        source: Any,
        priority: Priority = Priority.WRITE_BACK,
        sums: KnownSums | None = None,
    ) -> Ticket[None]:
        check_request(name, priority)
        memory = Buffer.of(name, source, writable=False)
        if sums is not None:  # checksums are for drives: here they are only checked for their form
            check_sums(name, sums, memory.nbytes)
        with self._lock:
            self._begin()
            used = self._used_bytes()
            free = self._capacity_bytes - used
            if memory.nbytes > free:
                raise CapacityError(
                    f"memory store: {name} needs {format_size(memory.nbytes)} ({memory.nbytes} "
                    f"bytes), {format_size(free)} ({free} bytes) of "
                    f"{format_size(self._capacity_bytes)} are free; a new generation lies beside "
                    "the old one until it is complete, and background saves keep old ones: wait "
                    "for theirs, or allow more host_memory"
                )
            self._peak_bytes = max(self._peak_bytes, used + memory.nbytes)
            data = _copy_in(memory)
            self._generation += 1
            self._chunks[name] = (self._generation, data)
        done: Ticket[None] = Ticket.of(None, f"write of {name}")
        return done

    def read(
        self, name: str, target: Any, priority: Priority = Priority.WAITED_FOR
    ) -> Ticket[None]:
        check_request(name, priority)
        with self._lock:
            self._begin()
            _, data = self._chunk(name)
        return _copy_out(name, data, target)

    def free(self, name: str) -> None:
        self._check_usable()
        self._chunk(name)
        self._freed.append((name, self._generation))
        with attempt(self._lock) as is_ours:
            if is_ours:
                self._take_in_freed()

    def _begin(self) -> None:
        """Check that the store is open and take in what was freed. The caller holds the lock."""
        self._check_usable()
        self._take_in_freed()

    def _take_in_freed(self) -> None:
        while self._freed:
            name, generation = self._freed.popleft()
            if name in self._chunks and self._chunks[name][0] <= generation:
                del self._chunks[name]

    def snapshot(self, names: Iterable[str] | None = None) -> MemorySnapshot:
        with self._lock:
            self._begin()
            wanted = list(self._chunks) if names is None else list(names)
            taken = MemorySnapshot(self, {name: self._chunk(name) for name in wanted})
            self._snapshots.add(taken)
            return taken

    def names(self) -> list[str]:
        with self._lock:
            self._begin()
            return sorted(self._chunks)

    def nbytes_of(self, name: str) -> int:
        with self._lock:
            self._begin()
            return self._chunk(name)[1].nbytes

    def generation_of(self, name: str) -> int:
        with self._lock:
            self._begin()
            return self._chunk(name)[0]

    def stats(self) -> StoreStats:
        with self._lock:
            self._take_in_freed()
            return StoreStats(
                "memory",
                self._capacity_bytes,
                self._used_bytes(),
                self._peak_bytes,
                0,
                len(self._chunks),
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._chunks.clear()
            for snapshot in self._snapshots:
                snapshot.release()
        self._give_back()

    def _used_bytes(self) -> int:
        """Add up the generations that are current or pinned, each once."""
        kept = {generation: data.nbytes for generation, data in self._chunks.values()}
        for snapshot in self._snapshots:
            kept |= {generation: data.nbytes for generation, data in snapshot.chunks.values()}
        return sum(kept.values())

    def _chunk(self, name: str) -> tuple[int, Bytes]:
        if name not in self._chunks:
            raise StateError(
                f"store: nothing is stored as {name!r}; {len(self._chunks)} chunks are stored"
            )
        return self._chunks[name]

    def _check_usable(self) -> None:
        if self._closed:
            raise StateError("store: closed")

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class MemorySnapshot:
    """A snapshot of a `MemoryStore`. Stored bytes never change, so references to them suffice."""

    def __init__(self, store: MemoryStore, chunks: dict[str, tuple[int, Bytes]]) -> None:
        self.generations = {name: generation for name, (generation, _) in chunks.items()}
        self.chunks = chunks
        self._store = store
        self._released = False

    def read(self, name: str, target: Any, priority: Priority = Priority.PREFETCH) -> Ticket[None]:
        check_request(name, priority)
        self._store._check_usable()
        if self._released or name not in self.chunks:
            raise StateError(f"snapshot: {'released' if self._released else f'without {name!r}'}")
        return _copy_out(name, self.chunks[name][1], target)

    def release(self) -> None:
        self._released = True
        self.chunks = {}

    def __enter__(self) -> MemorySnapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _copy_in(memory: Buffer) -> Bytes:
    data = np.empty(memory.nbytes, dtype=np.uint8)
    ctypes.memmove(data.ctypes.data, memory.address, memory.nbytes)
    return data


def _copy_out(name: str, data: Bytes, target: Any) -> Ticket[None]:
    memory = Buffer.of(name, target, writable=True)
    if memory.nbytes != data.nbytes:
        raise ConfigError(
            f"{name}: expected a target of {data.nbytes} bytes as stored, got {memory.nbytes}"
        )
    ctypes.memmove(memory.address, data.ctypes.data, memory.nbytes)
    done: Ticket[None] = Ticket.of(None, f"read of {name}")
    return done
