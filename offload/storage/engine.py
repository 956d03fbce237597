"""The contract of the I/O engines, and their common base.

An engine moves bytes between memory and files, asynchronously. A group of transfers has one ticket.
The engine cuts transfers into pieces, keeps several in flight, serves reads that a thread waits for
before prefetches before write-backs, continues short transfers, retries EINTR and EAGAIN, and
computes (write) or compares (read) the checksums of each piece. An error that a retry cannot mend
fails the ticket with a `StoreError` that names operation, file, offset and tensor. An operation
that the system does not answer within `timeout_s` fails with `StoreTimeout` and a table of what is
in flight; its memory is kept alive, since the kernel may still write to it.

Engines know files and addresses; they do not know chunks, generations or free space.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.core.config import format_size
from offload.core.errors import CorruptionError, OffloadError, StateError, StoreError, StoreTimeout
from offload.core.locks import attempt, steadfast
from offload.core.ticket import GivenUp, Ticket
from offload.storage.buffers import Buffer

PIECE_BYTES = 1 << 20
SUM_BYTES = 128 << 10  # covered by one checksum known before a write; as in kernels/checksum.h
DEPTH = 16
MOST_DEPTH = 4096  # a ring has twice as many places, and no more than 32768
TIMEOUT_S = 30.0
# Engines with an operation that never ended: the memory it may touch must live to the process end.
_STUCK: list[IOEngine] = []
OPEN_ENGINES: weakref.WeakSet[IOEngine] = weakref.WeakSet()  # engines whose threads run
Sums: TypeAlias = "array[int]"
KnownSums: TypeAlias = NDArray[np.uint64]  # one for each SUM_BYTES, from the producer of the bytes


class Priority(IntEnum):
    """The order in which an engine serves transfers; the lower number goes first."""

    WAITED_FOR = 0
    PREFETCH = 1
    WRITE_BACK = 2


class IOFile(Protocol):
    """An open file. align: of addresses, offsets and lengths; 1 through the page cache."""

    @property
    def fd(self) -> int: ...

    @property
    def align(self) -> int: ...

    @property
    def label(self) -> str: ...


class Transfer(NamedTuple):
    """A transfer of bytes between memory and a file.

    sums: one checksum for each `sum_bytes` of the engine; a write fills them in, a read compares
    them. Empty for a read of bytes that no engine here has written: nothing is compared.
    """

    name: str  # the tensor's or chunk's, for messages
    is_write: bool
    file: IOFile
    offset: int
    memory: Buffer
    sums: Sums
    is_known: bool = False  # of a write: the sums that are not 0 are already those of the bytes

    @property
    def operation(self) -> str:
        return "write" if self.is_write else "read"


_NO_SUM: Sums = array("Q", [0])


def make_sums(nbytes: int, sum_bytes: int) -> Sums:
    return _NO_SUM * -(-nbytes // sum_bytes)


class FaultKind(Enum):
    """The effect of an injected fault on an operation; values as in kernels/io_engine.h."""

    NONE = 0
    ERROR = 1  # fails with an errno
    SHORT_HALF = 2  # moves half of the bytes
    SHORT_ZERO = 3  # moves none
    FLIP = 4  # flips one bit of the bytes it moves
    LOST_WRITE = 5  # reports success and writes nothing
    LOST_COMPLETION = 6  # never completes
    DELAY = 7


@dataclass(frozen=True)
class Fault:
    """A fault for tests: the `nth` operation from now (from 1, retries count) goes wrong; with
    `forever` all operations from then on.
    """

    kind: FaultKind
    nth: int = 1
    forever: bool = False
    code: int = errno.EIO  # of ERROR; milliseconds of DELAY
    seed: int = 0  # which bit FLIP takes


@dataclass(slots=True, eq=False)
class Group:
    """A set of transfers that end together, with one ticket. A subclass overrides `end`."""

    ticket: Ticket[None]
    priority: Priority
    engine: IOEngine | None = None
    begun: bool = False  # the engine has accepted it: `end` will be called
    is_dropped: bool = False  # its start was interrupted: no caller has the ticket
    ids: Sequence[int] = ()
    left: int = 0
    error: OffloadError | None = None

    def end(self, error: OffloadError | None) -> None:
        """Record that the group has ended. The engine calls it once, before the ticket ends, as a
        rule in its own thread, but also in the one that submits or closes. A time-out (ETIMEDOUT)
        takes precedence over any other error: the memory and the file's bytes are then not free
        although the ticket has ended.
        """

    def urge(self) -> None:
        """Raise the priority of its transfers to that of a read that a thread waits for."""
        if self.priority > Priority.WAITED_FOR:
            self.priority = Priority.WAITED_FOR
            assert self.engine is not None, "urged before submit"
            for number in self.ids:
                self.engine._promote(number)


class IOEngine(ABC):
    """An I/O engine. Any thread may call it; `close` ends it. Forked children must not use it."""

    name: str
    piece_bytes: int
    sum_bytes: int  # covered by one checksum; a piece is a multiple of it
    takes_sums = False  # whether it heeds `Transfer.is_known`

    def __init__(self, name: str, piece_bytes: int, timeout_s: float) -> None:
        self.name, self.piece_bytes, self.timeout_s = name, piece_bytes, timeout_s
        self.sum_bytes = piece_bytes
        self.notes: list[str] = []  # features that the system refused, for the report
        self.held: Sequence[Buffer] = ()  # memory that lives until the engine is closed
        self.pid = os.getpid()
        self._numbers = count(1)
        self._lock = threading.RLock()  # a finalizer may take it again in the same thread
        self._flying: dict[int, tuple[Transfer, Group]] = {}
        self._abandoned: dict[int, Transfer] = {}  # timed out; their memory may still be touched
        self._closed = False
        self._broken: BaseException | None = None  # the error that ended the engine's own thread
        self._closing = threading.Lock()
        self.is_over = False  # closed, and only abandoned transfers are in flight, if any

    # --- for the store ----------------------------------------------------------------------------

    def submit(self, group: Group, transfers: Sequence[Transfer]) -> None:
        """Start `transfers`; the group's ticket ends when the last of them has ended.

        When it raises after the group has `begun`, at Ctrl-C for example, the group's `end` is
        called all the same: started transfers go on, and their memory is in use until then.
        """
        entries: dict[int, tuple[Transfer, Group]] = {}
        for transfer in transfers:
            entries[next(self._numbers)] = transfer, group
        group.ids, group.left, group.engine = tuple(entries), len(entries), self
        try:
            group.begun = True
            self.check_usable()
            with self._lock:
                if self._closed or self._broken is not None:
                    self.check_usable()
                self._flying.update(entries)  # from here on `close` ends them, too
            if group.priority > Priority.WAITED_FOR:
                group.ticket.urge = group.urge
            for number, (transfer, _) in entries.items():
                self._start(number, transfer, group.priority)
            if not entries:
                self._end_group(group)
        except BaseException:
            self._give_up(group)
            raise

    def _give_up(self, group: Group) -> None:
        """Cancel the transfers of a group that have not started, perhaps all of them."""
        group.is_dropped = True
        with self._lock:
            was_known = group.left < len(group.ids) or any(n in self._flying for n in group.ids)
        if not was_known:
            group.error = StateError(f"{group.ticket.what}: could not be started")
            self._end_group(group)
        for number in group.ids if was_known else ():
            self._withdraw(number)

    def check_usable(self, may_be_closed: bool = False) -> None:
        if os.getpid() != self.pid:
            raise StateError("store: made by the parent process; a forked child must not use it")
        if may_be_closed:
            return
        if self._closed:
            raise StateError("store: closed")
        if self._broken is not None:
            raise StateError(
                "store: its I/O engine has failed; start again from a checkpoint"
            ) from self._broken

    @property
    def abandoned_bytes(self) -> int:
        """The bytes of memory that timed-out operations may still touch."""
        with self._lock:
            return sum(transfer.memory.nbytes for transfer in self._abandoned.values())

    def describe(self) -> str:
        """List what is in flight, one transfer a line, the oldest 20."""
        rows = []
        with self._lock:
            transfers = {number: entry[0] for number, entry in self._flying.items()}
            transfers |= self._abandoned
        for number, seconds in sorted(self._ages().items(), key=lambda row: -row[1]):
            transfer = transfers.get(number)
            if transfer is None:
                continue
            age = "waits in the queue" if seconds < 0 else f"for {seconds:.1f} s"
            rows.append(
                f"{transfer.operation} of {transfer.name}, {format_size(transfer.memory.nbytes)} "
                f"at {transfer.offset} of {transfer.file.label}, {age}"
            )
        shown = rows[:20] + ([f"and {len(rows) - 20} more"] if len(rows) > 20 else [])
        return "nothing" if not shown else "\n  " + "\n  ".join(shown)

    def _run(self, thread: threading.Thread) -> None:
        """Start the engine's own thread, which is ended at the latest when the process ends."""
        self._thread = thread
        OPEN_ENGINES.add(self)
        thread.start()

    # --- for the engines --------------------------------------------------------------------------

    @abstractmethod
    def _start(self, number: int, transfer: Transfer, priority: Priority) -> None: ...

    @abstractmethod
    def _withdraw(self, number: int) -> None:
        """Cancel a transfer that has not started; a started one goes on."""

    @abstractmethod
    def _promote(self, number: int) -> None:
        """Raise a transfer's priority to WAITED_FOR. The engine may already be closed."""

    @abstractmethod
    def _ages(self) -> dict[int, float]:
        """Return for how many seconds each transfer has been in flight; negative: still queued."""

    @abstractmethod
    def sum_of(self, memory: Buffer) -> int:
        """Return the checksum of at most `sum_bytes` bytes."""

    @abstractmethod
    def inject(self, fault: Fault) -> None:
        """Let operations go wrong from now on as `fault` says. For tests."""

    @abstractmethod
    def attempts(self) -> int:
        """Return the number of operations since the last `inject`. For tests."""

    @abstractmethod
    def _stop(self) -> None:
        """End what is in flight. It may be interrupted and is then called again."""

    def close(self) -> None:
        """End what is in flight and refuse new transfers. Idempotent; a call after an interrupted
        one continues it.
        """
        if os.getpid() != self.pid:
            return
        with steadfast, attempt(self._closing) as is_first:
            if is_first:  # else another call is closing it
                with self._lock:
                    self._closed = True
                if not self.is_over:
                    self._stop()
                    self.is_over = True
                    OPEN_ENGINES.discard(self)

    def _keep_if_stuck(self, ended: bool) -> None:
        if not ended or self._abandoned:
            _STUCK.append(self)

    def _end(self, number: int, code: int, at: int = 0) -> None:
        """End transfer `number` with errno `code` (0: success), which arose `at` bytes into it."""
        with self._lock:
            entry = self._flying.pop(number, None)
            if entry is None:  # it timed out before
                self._abandoned.pop(number, None)
                return
            transfer, group = entry
            if code:
                self._note_failure(number, transfer, group, code, at)
            group.left -= 1
            if group.left:
                return
        # A waiting thread may reuse the memory the moment the ticket ends: hold no reference to it.
        del entry, transfer
        self._end_group(group)

    def _note_failure(
        self, number: int, transfer: Transfer, group: Group, code: int, at: int
    ) -> None:
        """Note the group's error; a time-out replaces any other. The caller holds the lock."""
        if code == errno.ETIMEDOUT:
            self._abandoned[number] = transfer
        if group.error is None or code == errno.ETIMEDOUT:
            group.error = self._error(transfer, code, at)

    def _end_group(self, group: Group) -> None:
        try:
            group.end(group.error)
        except BaseException as broken:
            group.ticket.fail(broken)
            return
        if group.is_dropped:
            return
        error = group.error
        if error is None:
            group.ticket.finish(None)
        else:
            group.ticket.fail(error)

    def _break(self, error: BaseException) -> None:
        """Time out all that is in flight after `error` has ended the engine's own thread, which
        alone takes in completions. The kernel may go on with it, so its memory is set aside.
        """
        self._broken = error
        for number in list(self._flying):
            self._end(number, errno.ETIMEDOUT)

    def _forget(self, number: int) -> None:
        """Drop a timed-out transfer that has ended after all."""
        with self._lock:
            self._abandoned.pop(number, None)

    def _error(self, transfer: Transfer, code: int, at: int) -> OffloadError:
        where = f"{transfer.file.label}, offset {transfer.offset + at}"
        what = f"{transfer.operation} of {transfer.name} ({format_size(transfer.memory.nbytes)})"
        if code == errno.ECANCELED:
            return GivenUp(f"{what}: the store was closed before it was done")
        kind: type[StoreError] = StoreTimeout if code in _TIME_OUTS else StoreError
        if code == errno.ETIMEDOUT and self._broken is not None:
            why = (
                f"the I/O engine has failed ({self._broken!r}); the memory is set aside, the store "
                "is unusable: start again from a checkpoint"
            )
        elif code == errno.ETIMEDOUT:
            why = (
                f"no answer from {where} within {self.timeout_s:g} s; the drive or its driver "
                "hangs (see dmesg); its memory is set aside, the rest goes on; in flight: "
                f"{self.describe()}"
            )
        elif code == errno.ETIME:
            why = (
                f"not started, {where} has not answered any operation before it within "
                f"{self.timeout_s:g} s; the drive or its driver hangs (see dmesg); in flight: "
                f"{self.describe()}"
            )
        elif code == errno.EBADMSG:
            kind = CorruptionError
            why = (
                f"what was read from {where} is not what was written; the drive, its cable or the "
                "memory is faulty, another process wrote to the file, or the source was changed "
                "before its write had ended: do not trust it; go back to a checkpoint and use "
                "another drive"
            )
        else:
            name, remedy = errno.errorcode.get(code, code), _REMEDIES.get(code, _SEE_DMESG)
            why = f"{name} ({os.strerror(code)}) in {where}; {remedy}"
        return kind(
            f"{what}: {why}",
            errno=code,
            operation=transfer.operation,
            file=transfer.file.label,
            offset_bytes=transfer.offset + at,
            tensor=transfer.name,
        )


@atexit.register
def _close_all() -> None:
    """Close all engines before the interpreter ends: a thread that returns from C++ after that
    would crash the process.
    """
    for engine in list(OPEN_ENGINES):
        engine.close()


_TIME_OUTS = (errno.ETIMEDOUT, errno.ETIME)
_SEE_DMESG = "see dmesg for what the system says about it"
_REMEDIES = {
    errno.EIO: "the drive reports a failure: see dmesg and smartctl, use another drive",
    errno.ENOSPC: "the drive is full although its space was reserved: make room on it",
    errno.EDQUOT: "your quota is used up: raise it, or use another directory",
    errno.EAGAIN: "the system refused again and again: it is out of I/O resources",
    errno.ENODATA: "the file ends too early: was it cut short?",
    errno.ENOMEM: "the system has no memory left for a buffer: lower host_memory",
    errno.EFAULT: "the memory is gone: was it unmapped, or its file cut short?",
    errno.EBADF: "other code has closed the file",
}
