"""The engine for systems without the native core: asyncio, and `aiofiles` for the calls that block.

It is small rather than fast and keeps the contract of the native engines: pieces, priorities,
retries, checksums, faults, deadlines. Its checksum is zlib's CRC-32, not the native core's;
checksums are only compared by the engine that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import itertools
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import aiofiles.os

from offload.storage.buffers import Buffer
from offload.storage.engine import Fault, FaultKind, IOEngine, Priority, Transfer

_MOST_TRIES = 64  # of an operation that makes no progress
_ROUNDS = 8  # into which the wait for an operation is divided
_HEALTHY = Fault(FaultKind.NONE)

_read = aiofiles.os.wrap(os.preadv)
_write = aiofiles.os.wrap(os.pwritev)


@dataclass(eq=False)
class _QueuedTransfer:
    """A transfer that is queued or in flight. next_begin: of its next piece. out: since when each
    piece is in flight, and the task that moves it, which the loop itself does not hold.
    """

    number: int
    transfer: Transfer
    priority: Priority
    next_begin: int = 0
    out: dict[int, tuple[float, asyncio.Task[None]]] = field(default_factory=dict)
    code: int = 0
    at: int = 0

    @property
    def is_cut(self) -> bool:
        return self.next_begin >= self.transfer.memory.nbytes


class PythonEngine(IOEngine):
    """An engine of one event loop in a thread of its own, with `depth` pieces in flight on it."""

    def __init__(self, timeout_s: float, depth: int, piece_bytes: int) -> None:
        super().__init__("aiofiles", piece_bytes, timeout_s)
        self._fault, self._attempts = _HEALTHY, 0
        self._works: dict[int, _QueuedTransfer] = {}
        self._order = itertools.count()
        self._queue: list[tuple[int, int, _QueuedTransfer]] = []  # a heap; the first goes first
        self._places = depth  # for more pieces in flight
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._threads = _DaemonThreads()
        self._run(threading.Thread(target=self._serve, name="offload-aiofiles", daemon=True))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._wait_until_over())
        except BaseException as error:
            self._break(error)
        for task in asyncio.all_tasks(self._loop):  # operations that never ended
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _wait_until_over(self) -> None:
        await self._over.wait()
        while self._flying and self._failure is None:  # a submit just before `close` ends soon
            await asyncio.sleep(0.001)
        if self._failure is not None:
            raise self._failure

    # --- the contract -----------------------------------------------------------------------------

    def _start(self, number: int, transfer: Transfer, priority: Priority) -> None:
        # `_flying` keeps the memory alive until the ticket ends; tasks and threads live longer.
        memory = transfer.memory._replace(owner=None)
        work = _QueuedTransfer(number, transfer._replace(memory=memory), priority)
        self._loop.call_soon_threadsafe(self._enqueue, work)

    def _enqueue(self, work: _QueuedTransfer) -> None:
        self._works[work.number] = work
        is_late = self._closed and not work.is_cut
        self._settle(work, errno.ECANCELED if is_late else 0)
        self._line_up(work)

    def _line_up(self, work: _QueuedTransfer) -> None:
        """Queue the rest of a transfer at its priority; an entry with no rest does no harm."""
        heapq.heappush(self._queue, (int(work.priority), next(self._order), work))
        self._fill_places()

    def _withdraw(self, number: int) -> None:
        def withdraw() -> None:  # runs after the calls sent before it, `_enqueue` among them
            if number in self._flying and number not in self._works:
                self._end(number, errno.ECANCELED)

        self._call(withdraw)

    def _promote(self, number: int) -> None:
        def promote() -> None:
            work = self._works.get(number)
            if work is not None and work.priority > Priority.WAITED_FOR:
                work.priority = Priority.WAITED_FOR
                self._line_up(work)

        self._call(promote)

    def _call(self, act: Callable[[], None]) -> None:
        """Run `act` soon in the loop's thread, unless the loop has ended before."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def _ages(self) -> dict[int, float]:
        now_s = time.monotonic()
        return {
            number: max((now_s - since_s for since_s, _ in list(work.out.values())), default=-1.0)
            for number, work in list(self._works.items())
        }

    def sum_of(self, memory: Buffer) -> int:
        return zlib.crc32(memory.view())

    def inject(self, fault: Fault) -> None:
        self._fault, self._attempts = fault, 0

    def attempts(self) -> int:
        return self._attempts

    def _stop(self) -> None:
        def stop() -> None:
            for work in list(self._works.values()):
                if not work.is_cut:  # else all of it is in flight
                    self._settle(work, errno.ECANCELED, work.next_begin)
            self._over.set()

        self._call(stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s + 1.0)
        self._keep_if_stuck(not self._flying)

    # --- pieces -----------------------------------------------------------------------------------

    def _fill_places(self) -> None:
        """Start the next pieces while there are places for them in flight."""
        while self._places and self._queue:
            work = self._queue[0][2]
            if work.is_cut:
                heapq.heappop(self._queue)
                continue
            begin = work.next_begin
            work.next_begin += self.piece_bytes
            self._places -= 1
            carrier = self._loop.create_task(self._carry(work, begin))
            work.out[begin] = time.monotonic(), carrier

    async def _carry(self, work: _QueuedTransfer, begin: int) -> None:
        try:
            moving = asyncio.ensure_future(self._move(work, begin))
            for _ in range(_ROUNDS):  # not in one wait: the process may be stopped meanwhile
                await asyncio.wait({moving}, timeout=self.timeout_s / _ROUNDS)
                if moving.done():
                    break
            is_late = not moving.done()
            if is_late:  # the system call may still return one day; the others go on
                self._time_out(work, begin)
                self._make_place()
            code = await moving
            del work.out[begin]
            self._settle(work, code, begin)
            if not is_late:
                self._make_place()
        except Exception as error:
            self._failure = error
            self._over.set()

    def _time_out(self, work: _QueuedTransfer, begin: int) -> None:
        is_first = work.code != errno.ETIMEDOUT
        self._settle(work, errno.ETIMEDOUT, begin)
        if is_first:
            self._end(work.number, errno.ETIMEDOUT, begin)

    def _make_place(self) -> None:
        self._places += 1
        self._fill_places()

    def _settle(self, work: _QueuedTransfer, code: int = 0, at: int = 0) -> None:
        """Note an error, and end the transfer if nothing of it is in flight or to come. Of one that
        has timed out this is the late end.
        """
        if code:
            if work.code == 0 or code == errno.ETIMEDOUT:
                work.code, work.at = code, at
            work.next_begin = work.transfer.memory.nbytes
        if work.is_cut and not work.out:
            del self._works[work.number]
            self._end(work.number, work.code, work.at)

    async def _move(self, work: _QueuedTransfer, begin: int) -> int:
        """Move a piece, with retries, and check what was read; return 0 or the errno."""
        transfer, align, number = work.transfer, work.transfer.file.align, begin // self.piece_bytes
        nbytes = min(self.piece_bytes, transfer.memory.nbytes - begin)
        own = memory = transfer.memory.part(begin, nbytes).view()
        if nbytes % align or (transfer.memory.address + begin) % align:
            try:  # a new anonymous map: page aligned, and zero behind the end
                memory = memoryview(mmap.mmap(-1, -(-nbytes // align) * align))
            except OSError as error:
                return error.errno or errno.ENOMEM
            if transfer.is_write:
                memory[:nbytes] = own
        if transfer.is_write:
            transfer.sums[number] = zlib.crc32(memory[:nbytes])
        moved, tries = 0, 0
        while moved < len(memory):
            got = await self._attempt(transfer, memory[moved:], begin + moved, nbytes - moved)
            code = max(0, -got)
            if code not in (0, errno.EINTR, errno.EAGAIN):
                return code
            end = moved + max(0, got)
            end -= end % align if end < len(memory) else 0
            tries = 0 if end > moved else tries + 1
            moved = end
            if tries == _MOST_TRIES:
                return code or (errno.EIO if transfer.is_write else errno.ENODATA)
            if code == errno.EAGAIN:
                await asyncio.sleep(min(tries, 10) / 1000)
        if transfer.is_write or work.code:  # after an error the caller's memory is not touched
            return 0
        sums = transfer.sums  # empty where no engine here has written the bytes
        if sums and zlib.crc32(memory[:nbytes]) != int(sums[number]):
            return errno.EBADMSG
        if memory is not own:
            own[:] = memory[:nbytes]
        return 0

    async def _attempt(self, transfer: Transfer, memory: memoryview, at: int, nbytes: int) -> int:
        """Make one system call; return the number of bytes moved, or minus the errno. nbytes: of
        the memory, without what fills the last block.
        """
        fault = self._next_fault()
        match fault.kind:
            case FaultKind.ERROR:
                return -fault.code
            case FaultKind.SHORT_ZERO:
                return 0
            case FaultKind.LOST_WRITE:
                return len(memory)
            case FaultKind.LOST_COMPLETION:
                await self._loop.create_future()
            case FaultKind.DELAY:
                await asyncio.sleep(fault.code / 1000)
            case FaultKind.SHORT_HALF:
                half = len(memory) // 2
                memory = memory[: half - half % transfer.file.align]
            case FaultKind.FLIP if transfer.is_write:
                source, memory = memory, memoryview(mmap.mmap(-1, len(memory)))
                memory[:] = source
                _flip(memory[: max(1, nbytes)], fault.seed)
        if not memory:
            return 0
        call = _write if transfer.is_write else _read
        options: Any = {"loop": self._loop, "executor": self._threads}
        try:
            got: int = await call(transfer.file.fd, [memory], transfer.offset + at, **options)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except RuntimeError:  # the system has no more threads
            return -errno.EAGAIN
        if fault.kind is FaultKind.FLIP and not transfer.is_write:
            _flip(memory[: min(got, nbytes)], fault.seed)
        return got

    def _next_fault(self) -> Fault:
        self._attempts += 1
        fault = self._fault
        hit = self._attempts >= fault.nth if fault.forever else self._attempts == fault.nth
        return fault if hit else _HEALTHY


class _DaemonThreads(Executor):
    """An executor with a daemon thread for each call. The interpreter joins the threads of
    `ThreadPoolExecutor` at exit, so a drive that hangs would keep the process.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            try:
                future.set_result(function(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, name="offload-aiofiles", daemon=True).start()
        return future


def _flip(data: memoryview, seed: int) -> None:
    bit = seed % (8 * len(data))
    data[bit // 8] ^= 1 << (bit % 8)
