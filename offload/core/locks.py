"""Locks and waits that Ctrl-C cannot leave in a broken state.

Python runs a signal handler in the main thread between any two calls of Python code, and the
default handler for SIGINT raises there. `with` of a lock made by C is safe: no handler runs between
the acquire and the block that releases the lock. Locking by Python code is not safe: a
`threading.Condition`, an `Event`, a generator with `@contextmanager`, `acquire()` before `try`. Nor
is bookkeeping of more than one statement, lock or no lock. So

* an update that must not be left half-done is an `uninterrupted` section: Ctrl-C takes effect at
  its end, or in its waits, where it is handled like an error of the drive;
* clean-up that must run to its end is a `steadfast` section: Ctrl-C does not end its waits either.
  They have their own deadlines;
* all waits use the functions of this file, with a time limit.

Only Python's handler for SIGINT is deferred, and only in the main thread, which runs it. In other
threads a section costs nothing. Handlers of other signals run as always; one that raises may break
the operation in flight.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks for enums: ten times the cost
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager, suppress
from signal import SIGINT
from threading import get_ident
from typing import Any

from offload.core.errors import StoreTimeout

PATIENCE_S = 600.0  # for a working thread of this process, whose every operation has a deadline
_RECHECK_S = 1.0  # how long a wait may miss a change whose thread ended before it notified

Lock = Any  # threading.Lock or threading.RLock: made by C, so that `with` is safe


class _Deferral(ContextDecorator):
    """The deferral of SIGINT in sections of the main thread, which all enter this one object.

    A handler of another signal or a finalizer may run a section of its own between any two steps of
    `__enter__` and `__exit__`. The steps are ordered so that its section holds and no signal is
    lost: a section counts before its note is installed, and until the user's handler is restored.
    """

    depth = 0  # sections that this thread is in
    steadfast = 0  # how many of them are steadfast
    # `depth` when the innermost section began to wait: it may be interrupted. A section that a
    # signal handler runs during the wait is deeper.
    open_at = 0
    is_armed = False  # a `_Note` is installed in place of the user's handler
    noted: _Note | None = None  # the note that got a signal which is not delivered yet

    def __init__(self) -> None:
        self._note = _Note(None)
        self.main_thread = threading.main_thread().ident  # only a fork changes it

    def __enter__(self) -> None:
        if get_ident() != self.main_thread:
            return
        self.depth += 1
        if self.is_armed:
            return
        try:
            before = _signal.getsignal(SIGINT)
            if not callable(before):  # SIG_IGN, SIG_DFL or None: no handler that raises
                return
            if type(before) is not _Note:  # else a note was reinstalled: it has its `before`
                if self._note.before is not before:
                    self._note = _Note(before)
                try:
                    _signal.signal(SIGINT, self._note)
                except ValueError:  # the main thread of a subinterpreter
                    return
            self.is_armed = True
        except BaseException:  # a signal arrived before the note was installed
            self.depth -= 1
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.depth or get_ident() != self.main_thread:
            return
        if self.depth > 1:
            self.depth -= 1
            if kind is None and self.open_at == self.depth:  # a handler's; its wait goes on
                check()
            return
        try:
            self._disarm()
        finally:  # also if a new signal has just raised; no call, so no handler, between these
            self.depth, self.is_armed = 0, False
            noted, self.noted = self.noted, None
        if noted is not None and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            noted.before(SIGINT, sys._getframe())

    def _disarm(self) -> None:
        now = _signal.getsignal(SIGINT)
        if type(now) is _Note:
            self.is_armed = False  # a section that begins after the next line needs its own note
            _signal.signal(SIGINT, now.before)

    def forget(self) -> None:
        """Reset the state in a forked child, which is in none of the parent's sections."""
        self.main_thread = get_ident()
        self._disarm()
        self.depth = self.steadfast = self.open_at = 0
        self.is_armed, self.noted = False, None


class _Note:
    """A handler for SIGINT in sections, in place of `before`, which it defers.

    It acts as `before` outside of sections, where it may remain, or be reinstalled by code that
    took it for the user's handler.
    """

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, number: int, frame: object) -> None:
        if _DEFERRAL.open_at == _DEFERRAL.depth and not _DEFERRAL.steadfast:  # or in no section
            self.before(number, frame)
        else:
            _DEFERRAL.noted = self


_DEFERRAL = _Deferral()
os.register_at_fork(after_in_child=_DEFERRAL.forget)


class _Steadfast(ContextDecorator):
    def __enter__(self) -> None:
        _DEFERRAL.__enter__()
        if get_ident() == _DEFERRAL.main_thread:
            _DEFERRAL.steadfast += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # 0: in a child that was forked inside
        if _DEFERRAL.steadfast and get_ident() == _DEFERRAL.main_thread:
            _DEFERRAL.steadfast -= 1
        _DEFERRAL.__exit__(kind)


uninterrupted = _DEFERRAL  # with uninterrupted: ..., or @uninterrupted
steadfast = _Steadfast()


def check() -> None:
    """Deliver a deferred SIGINT here, between two parts of a long section."""
    state = _DEFERRAL
    if state.noted is not None and not state.steadfast and get_ident() == state.main_thread:
        noted, state.noted = state.noted, None
        noted.before(SIGINT, sys._getframe())


def _waiting(wait: Callable[..., Any], *args: object) -> Any:
    """Call `wait` and return its result. SIGINT may interrupt it although it is in a section."""
    if not _DEFERRAL.depth or get_ident() != _DEFERRAL.main_thread:
        return wait(*args)
    before = _DEFERRAL.open_at  # not 0 if this runs in a handler that interrupted another wait
    try:
        _DEFERRAL.open_at = _DEFERRAL.depth  # from here on the handler raises
        check()
        found = wait(*args)
    finally:
        _DEFERRAL.open_at = before
    return found


def acquire(lock: Lock, timeout_s: float) -> bool:
    """Wait for a lock that signals an event; return False if the time is over first.

    An interrupt may come after the acquire: for a lock that guards data use `with`.
    """
    return bool(_waiting(lock.acquire, True, min(timeout_s, threading.TIMEOUT_MAX)))


def nap(seconds: float) -> None:
    _waiting(time.sleep, seconds)


@contextmanager
def attempt(lock: Lock) -> Iterator[bool]:
    """Try to take the lock without blocking, and hold it while the block runs, as a section. Yields
    whether it is held.
    """
    with uninterrupted:
        is_held = lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()


class Gate:
    """A condition variable for data that `lock` guards. The caller takes the lock by `with`."""

    def __init__(self, lock: Lock) -> None:
        # An RLock has methods that release, and take again, all of its levels at once.
        self._let_go = getattr(lock, "_release_save", lock.release)
        self._have_again = getattr(lock, "_acquire_restore", lambda _: lock.acquire())
        self._waiters: deque[Lock] = deque()

    def wait(self, timeout_s: float) -> None:
        """Release the lock, which this thread holds, until `notify_all` or for `timeout_s`, but for
        `_RECHECK_S` at most; then take it again, also after an exception.
        """
        waiter = threading.Lock()
        with uninterrupted:
            waiter.acquire()
            self._waiters.append(waiter)
            depth = self._let_go()
            try:
                acquire(waiter, min(timeout_s, _RECHECK_S))
            finally:
                self._have_again(depth)
                with suppress(ValueError):  # `notify_all` has removed it
                    self._waiters.remove(waiter)

    def wait_until(
        self,
        is_so: Callable[[], bool],
        what: str,
        timeout_s: float = PATIENCE_S,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait, with the lock held, until `is_so()`.

        Raises `StoreTimeout`, which names `what`, when that took `timeout_s` without a change of
        the value of `progress()`.
        """
        until_s, seen = time.monotonic() + timeout_s, progress()
        while not is_so():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise StoreTimeout(
                    f"{what}: no progress for {timeout_s:g} s; a drive, a file system "
                    "or a rank does not answer (see dmesg, and what other ranks say): wait for it "
                    "again, or end the process",
                    operation=what,
                )
            self.wait(left_s)
            if (now := progress()) != seen:
                until_s, seen = time.monotonic() + timeout_s, now

    def notify_all(self) -> None:
        """Wake all waiting threads after a change.

        Call it with the lock held or, at the risk of a late wake-up, without it: a finalizer may.
        """
        with suppress(IndexError):  # no waiter is left
            while True:
                self._waiters.popleft().release()


class Flag:
    """An event that happens once, and that threads wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = Gate(self._lock)
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        self._gate.notify_all()

    def wait(
        self,
        what: str,
        timeout_s: float = PATIENCE_S,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until the flag is set; time-out and progress as in `Gate.wait_until`."""
        with self._lock:
            self._gate.wait_until(lambda: self.is_set, what, timeout_s, progress)
