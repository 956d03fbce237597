"""A store on drives that grows, for bytes whose total is not known beforehand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.core.errors import StateError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.files import BLOCK_BYTES

FIRST_BYTES = 256 << 20


class GrowingStore:
    """A series of disk stores, each twice as large as the one before; the next is opened when none
    has room. Each name is written once. Any thread may call it; finalizers may call `free`.
    """

    def __init__(self, directories: Sequence[Path], metrics: Metrics) -> None:
        self._directories = directories
        self._metrics = metrics
        self._stores: list[DiskStore] = []
        self._where: dict[str, DiskStore] = {}
        self._lock = threading.Lock()

    def write(
        self, name: str, source: Any, priority: Priority = Priority.WRITE_BACK
    ) -> Ticket[None]:
        """Start to store `source`. Raises `CapacityError` when the drives are full."""
        nbytes = Buffer.of(name, source, writable=False).nbytes
        with self._lock:
            store = self._with_room(nbytes)
            ticket = store.write(name, source, priority)
            self._where[name] = store
        return ticket

    def read(
        self, name: str, target: Any, priority: Priority = Priority.WAITED_FOR
    ) -> Ticket[None]:
        store = self._where.get(name)
        if store is None:
            raise StateError(f"store: nothing is stored as {name!r}")
        return store.read(name, target, priority)

    def free(self, name: str) -> None:
        """Free the chunk; do nothing if it was freed before, by `close` for example."""
        store = self._where.pop(name, None)
        if store is not None:
            with suppress(StateError):  # its write has failed, or the store is closed
                store.free(name)

    @property
    def used_bytes(self) -> int:
        return sum(store.stats().used_bytes for store in list(self._stores))

    def close(self) -> None:
        self._where.clear()
        while self._stores:
            self._stores.pop().close()

    def _with_room(self, nbytes: int) -> DiskStore:
        # Ask for the free bytes first: a write to a full store would wait for those in flight.
        needed = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        for store in reversed(self._stores):
            stats = store.stats()
            if stats.capacity_bytes - stats.used_bytes >= needed:
                return store
        last = self._stores[-1].stats().capacity_bytes if self._stores else FIRST_BYTES // 2
        store = DiskStore(self._directories, max(2 * last, needed), metrics=self._metrics)
        self._stores.append(store)
        return store
