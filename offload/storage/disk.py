"""The store on drives: chunks of bytes, copy on write, every byte checked.

A write makes a new generation of a chunk beside the old one, which stays readable until the new one
is complete, and stays current if the write fails. A read yields the generation that is the latest
complete one at the time of the call, or an error, never other bytes. Names are those of tensors,
since errors quote them. Any thread may call a store.

A chunk lies in extents of swap files. The table of extents, checksums and generations is in memory
only: the files are useless without it, which costs nothing, since they end with the process. A
generation keeps its extents until it is neither current nor being read.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offload.core.errors import CapacityError, ConfigError, OffloadError, StateError
from offload.core.locks import Gate, attempt
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket, in_follow_up
from offload.core.timeline import DISK_READS, DISK_WRITES, Event
from offload.storage.buffers import Buffer, find_anonymous
from offload.storage.choose import check_numbers, open_engine
from offload.storage.engine import (
    PIECE_BYTES,
    SUM_BYTES,
    TIMEOUT_S,
    Group,
    IOEngine,
    KnownSums,
    Priority,
    Sums,
    Transfer,
    make_sums,
)
from offload.storage.files import SwapFile, System, close_swap_files, open_swap_files
from offload.storage.space import ChunkTable, Extent, Space, StoreStats, Version

_WRITES = DISK_WRITES, "disk_written_bytes"  # the row of the timeline, and the counter
_READS = DISK_READS, "disk_read_bytes"
_RECHECK_S = 0.05  # after which a waiting writer notices room that a finalizer has freed


@dataclass(slots=True, eq=False, kw_only=True)
class _Operation(Group):
    """A write or a read in flight. It ends once: the call that takes its `version` ends it."""

    store: DiskStore
    name: str
    is_write: bool
    known: KnownSums | None = None
    version: Version | None = None
    is_expected: bool = False  # its bytes are counted in `Space.waiting_bytes`
    begin_s: float = 0.0

    def end(self, error: OffloadError | None) -> None:
        self.store._ended(self, error)


class DiskStore:
    """A store in unnamed files of one or several directories, `capacity_bytes` in all.

    The space is reserved at once; a copy-on-write store needs room for the chunks it holds and for
    the writes in flight. Each write goes to the directory with the shortest queue.

    engine: "io_uring", "threads" or "aiofiles" instead of the best one. memory: arenas to register
    with io_uring (`pool.buffer()`, tensors), held until the store is closed. piece_bytes: the size
    of one operation and its checksum, whole blocks. depth: operations in flight at once; None: this
    process's share of the depth at which a drive is fastest.
    """

    def __init__(
        self,
        directories: Path | str | Sequence[Path | str],
        capacity_bytes: int,
        *,
        metrics: Metrics | None = None,
        engine: str | None = None,
        memory: Sequence[Any] = (),
        timeout_s: float = TIMEOUT_S,
        depth: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        system: System | None = None,
    ) -> None:
        if isinstance(directories, Path | str):
            directories = [directories]
        paths = [Path(os.path.realpath(directory)) for directory in directories]
        if not paths or len(set(paths)) < len(paths):
            raise ConfigError(f"directories: expected one or several, each once, got {paths}")
        if capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes: expected 1 or more, got {capacity_bytes}")
        check_numbers(timeout_s, depth, piece_bytes)
        arenas = [Buffer.of("memory", each, writable=True) for each in memory]
        anonymous = find_anonymous(arenas)
        self.metrics = metrics or Metrics()
        self.timeout_s = timeout_s
        self._files = open_swap_files(paths, capacity_bytes, system or System())
        try:
            for file in self._files:
                if piece_bytes % file.align:
                    raise ConfigError(
                        f"piece_bytes: expected a multiple of {file.align}, which {file.label} "
                        f"asks for, got {piece_bytes}"
                    )
                for note in file.notes:
                    self.metrics.fall_back(f"disk store {file.directory}", note)
            self.engine: IOEngine = open_engine(
                [file.fd for file in self._files],
                arenas,
                metrics=self.metrics,
                name=engine,
                timeout_s=timeout_s,
                depth=depth,
                piece_bytes=piece_bytes,
            )
        except BaseException:
            close_swap_files(self._files)
            raise
        self._describe = self.engine.describe  # one bound method for all tickets
        self._anonymous = anonymous if self.engine.held else ()  # the engine keeps it alive
        self._space = Space(self._files)
        self._table = ChunkTable(self._space)
        self._read_bytes = self._written_bytes = 0
        self._lock = threading.Lock()
        self._room = Gate(self._lock)
        self._writers_waiting = 0  # at `_room`
        self._open = list(self._files)
        self._close = weakref.finalize(self, _shut, self.engine, self._open)

    # --- writing ----------------------------------------------------------------------------------

    def write(
        self,
        name: str,
        source: Any,
        priority: Priority = Priority.WRITE_BACK,
        sums: KnownSums | None = None,
    ) -> Ticket[None]:
        """Start to store `source` as the next generation of `name`. Its bytes must not change,
        nor its storage be resized, before the ticket has ended. sums: checksums that the producer
        of the bytes has computed, one for each `SUM_BYTES`, 0 where unknown; a read fails where the
        stored bytes have another one. They are copied before it returns, and save a second pass
        over bytes that were just made.

        Blocks up to `timeout_s` for room while operations in flight may free some; then raises
        `CapacityError` with the numbers. In the follow-up of a ticket, where nothing may block, it
        raises `StateError` instead of waiting.
        """
        priority = check_request(name, priority)
        memory = Buffer.of(name, source, False, self._anonymous)
        ticket: Ticket[None] = Ticket(f"write of {name}", self._describe)
        operation = _Operation(ticket, priority, store=self, name=name, is_write=True)
        if sums is not None:
            check_sums(name, sums, memory.nbytes)
            operation.known = sums if self.engine.takes_sums else None
        self.engine.check_usable()
        return self._operate(operation, memory, self._begin_write)

    def _begin_write(self, operation: _Operation, memory: Buffer) -> None:
        """Take room for a new generation, waiting if need be. The caller holds the lock."""
        version = operation.version = Version(operation.name, memory.nbytes)
        self._wait_for_room(version)
        known = operation.known
        if known is not None:
            version.sums = _cut_sums(known, version.extents)
            operation.known = known if version.sums else None
        if not version.sums:
            sum_bytes = self.engine.sum_bytes
            version.sums = [make_sums(nbytes, sum_bytes) for _, _, nbytes in version.extents]
        self._table.begin(version)

    def _wait_for_room(self, version: Version) -> None:
        deadline_s: float | None = None
        while True:
            self._table.take_in()
            if self._space.take(version.nbytes, version.extents):
                return
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + self.timeout_s
            hopeless = self._space.round_up(version.nbytes) > self._space.capacity_bytes
            if hopeless or not any(self._space.waiting_bytes) or now_s > deadline_s:
                raise CapacityError(self._space.refusal(version.name, version.nbytes))
            if in_follow_up():
                raise StateError(
                    f"disk store: {version.name} has to wait for room, in the follow-up of a "
                    "ticket, whose thread may be the one that makes room"
                )
            self._writers_waiting += 1
            try:
                self._room.wait(_RECHECK_S)
            finally:
                self._writers_waiting -= 1
            self.engine.check_usable()

    # --- reading ----------------------------------------------------------------------------------

    def read(
        self, name: str, target: Any, priority: Priority = Priority.WAITED_FOR
    ) -> Ticket[None]:
        """Start to fill `target`, which must have the length that was written, with the current
        generation of `name`. Its bytes are valid only when the ticket has ended without an error;
        its storage must not be resized before the end.
        """
        priority = check_request(name, priority)
        memory = Buffer.of(name, target, True, self._anonymous)
        ticket: Ticket[None] = Ticket(f"read of {name}", self._describe)
        operation = _Operation(ticket, priority, store=self, name=name, is_write=False)
        self.engine.check_usable()
        return self._operate(operation, memory, self._begin_read)

    def _begin_read(self, operation: _Operation, memory: Buffer) -> None:
        """Hold the current version for a read into `memory`. The caller holds the lock."""
        version = self._table.version(operation.name)
        if memory.nbytes != version.nbytes:
            raise ConfigError(
                f"{version.name}: expected a target of {version.nbytes} bytes as stored, got "
                f"{memory.nbytes}"
            )
        version.holders += 1
        operation.version = version

    # --- both -------------------------------------------------------------------------------------

    def _operate(
        self, operation: _Operation, memory: Buffer, begin: Callable[[_Operation, Buffer], None]
    ) -> Ticket[None]:
        """Start an operation on the version that `begin` gives it, under the lock. After any
        exception, also one of a signal handler, `_ended` is called exactly once.
        """
        try:
            with self._lock:
                begin(operation, memory)
                assert operation.version is not None
                # Its bytes count as waiting before it starts.
                waiting_bytes = self._space.waiting_bytes.copy()
                for file, _, nbytes in operation.version.extents:
                    waiting_bytes[file] += nbytes
                self._space.waiting_bytes = waiting_bytes
                operation.is_expected = True
                operation.begin_s = time.perf_counter()
            self.engine.submit(operation, self._transfers(operation, memory))
        except BaseException:
            if not operation.begun:
                self._ended(operation, StateError(f"{operation.name}: could not be started"))
            raise
        return operation.ticket

    def _transfers(self, operation: _Operation, memory: Buffer) -> list[Transfer]:
        version, is_write = operation.version, operation.is_write
        assert version is not None
        name, files, sums = version.name, self._files, version.sums
        is_known = operation.known is not None
        if len(sums) == 1:  # nearly always
            ((file, offset, _),) = version.extents
            return [Transfer(name, is_write, files[file], offset, memory, sums[0], is_known)]
        transfers, begin = [], 0
        for (file, offset, nbytes), each in zip(version.extents, sums, strict=True):
            part = memory.part(begin, nbytes)
            transfers.append(Transfer(name, is_write, files[file], offset, part, each, is_known))
            begin += nbytes
        return transfers

    def _ended(self, operation: _Operation, error: OffloadError | None) -> None:
        """Record that an operation has ended or could not be started. All in one hold of the lock:
        a writer that waits for room and sees nothing in flight gives up.
        """
        with self._lock:
            version, operation.version = operation.version, None
            if version is None:
                return
            if operation.is_expected:
                waiting_bytes = self._space.waiting_bytes
                for file, _, nbytes in version.extents:
                    waiting_bytes[file] -= nbytes
            moved_bytes = version.nbytes if error is None else 0
            if operation.is_write:
                self._written_bytes += moved_bytes
                self._table.end(version, error)
            else:
                self._read_bytes += moved_bytes
                self._table.let_go_after(version, error)
            if self._writers_waiting:
                self._room.notify_all()
        if error is None:
            row, count = _WRITES if operation.is_write else _READS
            begin_s, end_s = operation.begin_s, time.perf_counter()
            self.metrics.count(count, version.nbytes)
            self.metrics.event(Event(row, version.name, begin_s, end_s, version.nbytes))

    # --- the table --------------------------------------------------------------------------------

    def free(self, name: str) -> None:
        """Free the chunk, and discard every write of it that is in flight. Never blocks."""
        self.engine.check_usable()
        table = self._table
        if name not in table.current and name not in table.writing:
            raise table.unknown(name)
        # A finalizer may call this in the thread that holds the lock: then the next call that takes
        # the lock frees the chunk.
        table.freed.append((name, table.generation))
        with attempt(self._lock) as is_ours:
            if is_ours:
                table.take_in()
                self._room.notify_all()

    def names(self) -> list[str]:
        self.engine.check_usable()
        with self._lock:
            self._table.take_in()
            return sorted(self._table.current)

    # --- the whole --------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        self.engine.check_usable(may_be_closed=True)
        with self._lock:
            self._table.take_in()
            return StoreStats(
                self.engine.name,
                self._space.capacity_bytes,
                self._space.used_bytes,
                self._space.peak_bytes,
                self._table.quarantined_bytes,
                len(self._table.current),
                self._read_bytes,
                self._written_bytes,
            )

    def close(self) -> None:
        """End what is in flight and close the files. Idempotent; a call after an interrupted one
        continues it.
        """
        _shut(self.engine, self._open)
        self._close.detach()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _cut_sums(known: KnownSums, extents: Sequence[Extent]) -> list[Sums]:
    """Split the known checksums by extent; return nothing where an extent ends inside the span of a
    checksum.
    """
    found, begin = [], 0
    for _, _, nbytes in extents:
        if begin % SUM_BYTES:
            return []
        first, begin = begin // SUM_BYTES, begin + nbytes
        found.append(array("Q", known[first : -(-begin // SUM_BYTES)].tobytes()))
    return found


def _shut(engine: IOEngine, files: list[SwapFile]) -> None:
    """Close a store's engine and files. In a forked child do nothing: they are the parent's."""
    if os.getpid() != engine.pid:
        return
    engine.close()
    # A file that the kernel may still write to stays open until the process ends.
    if engine.is_over and engine.abandoned_bytes == 0:
        close_swap_files(files)


def check_request(name: object, priority: object) -> Priority:
    """Return `priority` as a `Priority`; raise a `ConfigError` where it or the name is invalid."""
    if not isinstance(name, str):
        raise ConfigError(f"name: expected a string, got {type(name).__name__}")
    if isinstance(priority, Priority):
        return priority
    try:
        return Priority(priority)  # type: ignore[arg-type]
    except ValueError as error:
        known = ", ".join(f"Priority.{each.name}" for each in Priority)
        raise ConfigError(f"priority: expected one of {known}, got {priority!r}") from error


def check_sums(name: str, sums: object, nbytes: int) -> None:
    """Raise a `ConfigError` unless `sums` has the form of the checksums of `nbytes` bytes."""
    if not isinstance(sums, np.ndarray) or sums.dtype != np.uint64 or sums.ndim != 1:
        got = (
            f"{sums.ndim} of {sums.dtype}" if isinstance(sums, np.ndarray) else type(sums).__name__
        )
        raise ConfigError(f"{name}: sums: expected an array of one dimension of uint64, got {got}")
    expected = -(-nbytes // SUM_BYTES)
    if len(sums) != expected:
        raise ConfigError(
            f"{name}: sums: expected {expected}, one for each {SUM_BYTES} of {nbytes} bytes, got "
            f"{len(sums)}"
        )
