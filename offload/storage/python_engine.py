"""The engine for systems without the native core: asyncio, and `aiofiles` for the calls that block.

It is small rather than fast and keeps the contract of the native engines: pieces, priorities,
retries, checksums, faults, deadlines. Its checksum is zlib's CRC-32, not the native core's;
checksums are only compared by the engine that made them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import aiofiles.os

from offload.storage.buffers import Buffer
from offload.storage.engine import (
    DEPTH,
    PIECE_BYTES,
    TIMEOUT_S,
    Fault,
    FaultKind,
    IOEngine,
    Priority,
    Transfer,
)

_MOST_TRIES = 64  # of an operation that makes no progress
_ROUNDS = 8  # into which the wait for an operation is divided
_STOP = 1 << 30  # the priority of the entry that ends a worker
_OPEN: weakref.WeakSet[PythonEngine] = weakref.WeakSet()

_read = aiofiles.os.wrap(os.preadv)
_write = aiofiles.os.wrap(os.pwritev)


@dataclass
class _QueuedTransfer:
    """A transfer that is queued or in flight; the workers cut pieces from it one by one."""

    number: int
    transfer: Transfer
    priority: Priority
    next_begin: int = 0
    out: int = 0
    code: int = 0
    at: int = 0
    reported: bool = False


@dataclass(eq=False)
class _TransferPiece:
    work: _QueuedTransfer
    begin: int
    nbytes: int
    memory: memoryview  # the memory of the system call, rounded up to whole blocks
    is_copy: bool  # not the caller's own memory
    moved: int = 0
    tries: int = 0
    since_s: float = field(default_factory=time.monotonic)
    fault: Fault | None = None
    given_up: bool = False


class PythonEngine(IOEngine):
    """An engine of one event loop in a thread of its own, with `depth` workers on it."""

    def __init__(
        self, timeout_s: float = TIMEOUT_S, depth: int = DEPTH, piece_bytes: int = PIECE_BYTES
    ) -> None:
        super().__init__("aiofiles", piece_bytes, timeout_s)
        self._fault: Fault | None = None
        self._attempts = 0
        self._works: dict[int, _QueuedTransfer] = {}
        self._pieces: set[_TransferPiece] = set()
        self._order = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._threads = _Threads(depth, "offload-aiofiles")
        self._queue: asyncio.PriorityQueue[tuple[int, int, int]] = asyncio.PriorityQueue()
        self._workers = [self._loop.create_task(self._worker()) for _ in range(depth)]
        self._thread = threading.Thread(target=self._run, name="offload-aiofiles", daemon=True)
        _OPEN.add(self)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._work_until_closed())
        except BaseException as error:
            self._break(error)
        for task in asyncio.all_tasks(self._loop):  # operations that never ended
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        self._threads.shutdown()

    async def _work_until_closed(self) -> None:
        await asyncio.gather(*self._workers)
        while self._flying:  # a submit passed the check just before `close`; it is refused soon
            await asyncio.sleep(0.001)

    # --- the contract -----------------------------------------------------------------------------

    def _start(self, number: int, transfer: Transfer, priority: Priority) -> None:
        # `_flying` keeps the memory alive until the ticket ends; tasks and threads live longer.
        memory = transfer.memory._replace(owner=None)
        work = _QueuedTransfer(number, transfer._replace(memory=memory), priority)
        self._loop.call_soon_threadsafe(self._enqueue, work)

    def _enqueue(self, work: _QueuedTransfer) -> None:
        if work.transfer.memory.nbytes == 0:
            self._end(work.number, 0)
            return
        self._works[work.number] = work
        if self._closed:
            self._fail(work, errno.ECANCELED, 0)
            return
        self._announce(work)

    def _announce(self, work: _QueuedTransfer) -> None:
        """Queue one entry for each piece that is still to be cut, at the transfer's priority."""
        left = work.transfer.memory.nbytes - work.next_begin
        for _ in range(-(-left // self.piece_bytes)):
            self._queue.put_nowait((int(work.priority), next(self._order), work.number))

    def _withdraw(self, number: int) -> None:
        def withdraw() -> None:  # runs after the calls sent before it, `_enqueue` among them
            if number in self._flying and number not in self._works:
                self._end(number, errno.ECANCELED)

        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(withdraw)

    def _promote(self, number: int) -> None:
        def promote() -> None:
            work = self._works.get(number)
            if work is not None and work.priority > Priority.WAITED_FOR:
                work.priority = Priority.WAITED_FOR
                self._announce(work)  # an entry that finds nothing left to cut does no harm

        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(promote)

    def _ages(self) -> dict[int, float]:
        now_s = time.monotonic()
        ages = {number: -1.0 for number in list(self._works)}
        for piece in list(self._pieces):
            number = piece.work.number
            ages[number] = max(ages.get(number, -1.0), now_s - piece.since_s)
        return ages

    def sum_of(self, memory: Buffer) -> int:
        return zlib.crc32(_memory_at(memory.address, memory.nbytes))

    def inject(self, fault: Fault) -> None:
        self._fault, self._attempts = fault, 0

    def attempts(self) -> int:
        return self._attempts

    def _stop(self) -> None:
        def stop() -> None:
            for work in list(self._works.values()):
                if work.next_begin < work.transfer.memory.nbytes:  # else all of it is in flight
                    self._fail(work, errno.ECANCELED, work.next_begin)
            for _ in self._workers:
                self._queue.put_nowait((_STOP, next(self._order), 0))

        with contextlib.suppress(RuntimeError):  # the loop has ended before
            self._loop.call_soon_threadsafe(stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s + 1.0)
        self._keep_if_stuck(not self._flying)
        _OPEN.discard(self)

    # --- pieces -----------------------------------------------------------------------------------

    async def _worker(self) -> None:
        while True:
            priority, _, number = await self._queue.get()
            if priority == _STOP:
                return
            await self._do_next_of(number)

    async def _do_next_of(self, number: int) -> None:
        """Move one piece of a transfer. Not part of `_worker`, whose frame would keep the piece's
        memory alive while it waits for the next.
        """
        work = self._works.get(number)
        if work is None or work.next_begin >= work.transfer.memory.nbytes:
            return
        try:
            piece = self._cut(work)
        except OSError as error:
            self._fail(work, error.errno or errno.ENOMEM, work.next_begin)
            return
        work.next_begin += piece.nbytes
        work.out += 1
        self._pieces.add(piece)
        moving = asyncio.ensure_future(self._move(piece))
        for _ in range(_ROUNDS):  # not in one wait: the process may be stopped for long meanwhile
            await asyncio.wait({moving}, timeout=self.timeout_s / _ROUNDS)
            if moving.done():
                break
        if moving.done():
            self._settle(piece, moving.result())
        else:  # the system call may still return one day; the worker goes on without it
            piece.given_up = True
            self._fail(work, errno.ETIMEDOUT, piece.begin)
            self._report(work)
            moving.add_done_callback(partial(self._settle_late, piece))

    def _cut(self, work: _QueuedTransfer) -> _TransferPiece:
        transfer, align = work.transfer, work.transfer.file.align
        begin = work.next_begin
        nbytes = min(self.piece_bytes, transfer.memory.nbytes - begin)
        address = transfer.memory.address + begin
        whole = -(-nbytes // align) * align
        memory = _memory_at(address, nbytes)
        is_copy = whole != nbytes or address % align != 0
        if is_copy:
            # A new anonymous map: page aligned, and zero behind the end.
            own = memoryview(mmap.mmap(-1, whole))
            if transfer.is_write:
                own[:nbytes] = memory
            memory = own
        if transfer.is_write:
            transfer.sums[begin // self.piece_bytes] = zlib.crc32(memory[:nbytes])
        return _TransferPiece(work, begin, nbytes, memory, is_copy)

    async def _move(self, piece: _TransferPiece) -> int:
        """Move all of the piece, with retries; return 0 or the errno."""
        align = piece.work.transfer.file.align
        while True:
            moved = await self._attempt(piece)
            if moved > 0:
                end = piece.moved + moved
                end = end if end >= len(piece.memory) else end - end % align
                progress = end > piece.moved
                piece.moved = end
                if piece.moved >= len(piece.memory):
                    return self._verify(piece)
                if progress:
                    piece.tries = 0
                    continue
                moved = 0
            code = -moved
            if code not in (0, errno.EINTR, errno.EAGAIN):
                return code
            piece.tries += 1
            if piece.tries >= _MOST_TRIES:
                return code or (errno.EIO if piece.work.transfer.is_write else errno.ENODATA)
            if code == errno.EAGAIN:
                await asyncio.sleep(min(piece.tries, 10) / 1000)

    async def _attempt(self, piece: _TransferPiece) -> int:
        """Make one system call; return the number of bytes moved, or minus the errno."""
        transfer, align = piece.work.transfer, piece.work.transfer.file.align
        fault = self._next_fault()
        memory = piece.memory[piece.moved :]
        if fault is not None:
            if fault.kind is FaultKind.ERROR:
                return -fault.code
            if fault.kind is FaultKind.SHORT_ZERO:
                return 0
            if fault.kind is FaultKind.SHORT_HALF:
                half = len(memory) // 2
                memory = memory[: half - half % align]
                if not memory:
                    return 0
            elif fault.kind is FaultKind.LOST_WRITE:
                return len(memory)
            elif fault.kind is FaultKind.LOST_COMPLETION:
                await self._loop.create_future()
            elif fault.kind is FaultKind.DELAY:
                await asyncio.sleep(fault.code / 1000)
            elif fault.kind is FaultKind.FLIP and transfer.is_write:
                memory = memoryview(mmap.mmap(-1, len(memory)))
                memory[:] = piece.memory[piece.moved :]
                _flip(memory[: max(1, piece.nbytes - piece.moved)], fault.seed)
        offset = transfer.offset + piece.begin + piece.moved
        try:
            call = _write if transfer.is_write else _read
            moved: int = await call(
                transfer.file.fd, [memory], offset, loop=self._loop, executor=self._threads
            )
        except OSError as error:
            return -(error.errno or errno.EIO)
        if fault is not None and fault.kind is FaultKind.FLIP and not transfer.is_write:
            _flip(piece.memory[piece.moved : min(piece.moved + moved, piece.nbytes)], fault.seed)
        return moved

    def _next_fault(self) -> Fault | None:
        self._attempts += 1
        fault = self._fault
        if fault is None or fault.kind is FaultKind.NONE:
            return None
        hit = self._attempts >= fault.nth if fault.forever else self._attempts == fault.nth
        return fault if hit else None

    def _verify(self, piece: _TransferPiece) -> int:
        transfer = piece.work.transfer
        if transfer.is_write or piece.given_up:
            return 0
        data = piece.memory[: piece.nbytes]
        sums = transfer.sums  # empty where no engine here has written the bytes
        if sums and zlib.crc32(data) != int(sums[piece.begin // self.piece_bytes]):
            return errno.EBADMSG
        if piece.is_copy:
            _memory_at(transfer.memory.address + piece.begin, piece.nbytes)[:] = data
        return 0

    def _settle_late(self, piece: _TransferPiece, moving: asyncio.Future[int]) -> None:
        if not moving.cancelled():
            self._settle(piece, moving.result())

    def _settle(self, piece: _TransferPiece, code: int) -> None:
        work = piece.work
        self._pieces.discard(piece)
        work.out -= 1
        if code:
            self._fail(work, code, piece.begin)
        elif work.out == 0 and work.next_begin >= work.transfer.memory.nbytes:
            self._finish(work)

    def _fail(self, work: _QueuedTransfer, code: int, at: int) -> None:
        if work.code == 0 or (code == errno.ETIMEDOUT and not work.reported):
            work.code, work.at = code, at
        work.next_begin = work.transfer.memory.nbytes
        if work.out == 0:
            self._finish(work)

    def _report(self, work: _QueuedTransfer) -> None:
        if not work.reported:
            work.reported = True
            self._end(work.number, work.code, work.at)

    def _finish(self, work: _QueuedTransfer) -> None:
        if self._works.pop(work.number, None) is None:
            return
        if work.reported:
            self._forget(work.number)
        else:
            self._end(work.number, work.code, work.at)


class _Threads(Executor):
    """An executor of daemon threads for calls that block. The interpreter joins the threads of
    `ThreadPoolExecutor` at exit, so a drive that hangs would keep the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put(partial(_call, future, partial(function, *args, **options)))
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it refers to the memory

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        for _ in range(self._count):
            self._calls.put(None)


def _call(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _flip(data: memoryview, seed: int) -> None:
    bit = seed % (8 * len(data))
    data[bit // 8] ^= 1 << (bit % 8)


@atexit.register
def _close_all() -> None:
    for engine in list(_OPEN):
        engine.close()
