"""Locks, waits, and Ctrl-C in the middle of either.

A signal handler runs in the main thread between any two calls of Python's, and the default one for
SIGINT raises there. `with` of a lock that C has made is safe: nothing runs between the moment it is
taken and the block that releases it. Whatever enters by Python is not: a `threading.Condition`, an
`Event`, a generator with `@contextmanager`, `acquire()` before `try`. Nor is bookkeeping of more
than one statement, lock or no lock. So

* what must not be left half-done is a section that is `uninterrupted`: Ctrl-C takes effect at its
  end, or where it waits, as an error of the drive would;
* clean-up that must come to its end is `steadfast`: not even its waits are ended. They have
  deadlines of their own;
* who waits, waits here, for a limited time.

Only Python's handler for SIGINT is put off, and only in the main thread, the one that runs it.
Elsewhere sections cost nothing. Handlers of other signals run as always; who raises from them may
break what is under way.
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
from typing import Any

from offload.core.errors import StoreTimeout

PATIENCE_S = 600.0  # for another thread of this process that works, whose every act has a deadline
_RECHECK_S = 1.0  # how long a wait may overlook a change whose thread was ended before it told

Lock = Any  # threading.Lock or threading.RLock: made by C, so that `with` is safe


class _Deferral:
    """What is being put off, in the main thread.

    Whatever runs a section between any two steps of `begin` and `end`, a handler of another signal
    or a finalizer, finds them so that its own section holds and no signal is lost: a section counts
    before its note is there, and until the handler is there again.
    """

    depth = 0  # sections that are open
    steadfast = 0  # how many of them are
    open_at = 0  # as many were when it began to wait: the innermost may be interrupted
    is_armed = False  # a note is there instead of the handler
    noted: _Note | None = None  # a signal has come to it that nobody has heard of

    def __init__(self) -> None:
        self._note = _Note(None)

    @property
    def is_open(self) -> bool:
        """It waits, and may be interrupted. Not what a handler does while it waits."""
        return self.depth > 0 and self.open_at == self.depth

    def begin(self) -> None:
        if not _in_main_thread():
            return
        self.depth += 1
        if self.is_armed:
            return
        try:
            self._arm()
        except BaseException:  # it came before the note was there
            self.depth -= 1
            raise

    def _arm(self) -> None:
        before = _signal.getsignal(SIGINT)
        if not callable(before):  # nothing would be raised
            return
        if type(before) is not _Note:  # else somebody has put it back: it knows whom it is for
            if self._note.before is not before:
                self._note = _Note(before)
            try:
                _signal.signal(SIGINT, self._note)
            except ValueError:  # the main thread of another interpreter than the main one
                return
        self.is_armed = True

    def end(self, kind: type[BaseException] | None) -> None:
        if not self.depth or not _in_main_thread():
            return
        if self.depth > 1:
            self.depth -= 1
            if kind is None and self.is_open:  # a handler's, and what it has interrupted waits on
                self.check()
            return
        try:
            self._disarm()
        finally:  # also where a new one has come just now; nothing is called between these
            self.depth, self.is_armed = 0, False
            noted, self.noted = self.noted, None
        if noted is not None and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            noted.before(SIGINT, sys._getframe())

    def _disarm(self) -> None:
        now = _signal.getsignal(SIGINT)
        if type(now) is _Note:
            self.is_armed = False  # a section that begins after the next line needs one of its own
            _signal.signal(SIGINT, now.before)

    def check(self) -> None:
        if self.noted is not None and not self.steadfast:
            noted, self.noted = self.noted, None
            noted.before(SIGINT, sys._getframe())

    def forget(self) -> None:
        """In a forked child, which is in none of the parent's sections."""
        self._disarm()
        self.depth = self.steadfast = self.open_at = 0
        self.is_armed, self.noted = False, None


class _Note:
    """The handler for SIGINT in sections, in place of `before`. Where it has stayed or was put back
    by somebody who took it for the user's, it is as if `before` were there.
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


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class _Uninterrupted(ContextDecorator):
    def __enter__(self) -> None:
        _DEFERRAL.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _DEFERRAL.end(kind)


class _Steadfast(ContextDecorator):
    def __enter__(self) -> None:
        _DEFERRAL.begin()
        if _in_main_thread():
            _DEFERRAL.steadfast += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _DEFERRAL.steadfast and _in_main_thread():  # 0: in a child that was forked inside
            _DEFERRAL.steadfast -= 1
        _DEFERRAL.end(kind)


uninterrupted = _Uninterrupted()  # with uninterrupted: ..., or @uninterrupted
steadfast = _Steadfast()


def check() -> None:
    """Be interrupted here, between two parts of a long section, if a signal has come."""
    if _DEFERRAL.noted is not None and _in_main_thread():
        _DEFERRAL.check()


def _waiting(wait: Callable[[], Any]) -> Any:
    """What `wait` returns, which may be interrupted although the section may not."""
    if not _DEFERRAL.depth or not _in_main_thread():
        return wait()
    before = _DEFERRAL.open_at  # not 0 where a handler waits that has interrupted a wait
    try:
        _DEFERRAL.open_at = _DEFERRAL.depth  # from here on the handler raises
        check()
        found = wait()
    finally:
        _DEFERRAL.open_at = before
    return found


def acquire(lock: Lock, timeout_s: float) -> bool:
    """Wait for a lock that tells of an event. It may have been taken although this was interrupted:
    for one that guards something use `with`.
    """
    return bool(_waiting(lambda: lock.acquire(True, min(timeout_s, threading.TIMEOUT_MAX))))


def nap(seconds: float) -> None:
    _waiting(lambda: time.sleep(seconds))


@contextmanager
def attempt(lock: Lock) -> Iterator[bool]:
    """Whether the lock was to be had at once; if so it is held inside, in a section."""
    with uninterrupted:
        is_held = lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()


class Gate:
    """Threads that wait for what a lock guards to change; `with` takes the lock itself."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiters: deque[Lock] = deque()

    def wait(self, timeout_s: float) -> None:
        """Let go of the lock, which this thread has, until somebody tells or the time is over; then
        have it again, whatever happens.
        """
        waiter = threading.Lock()
        with uninterrupted:
            waiter.acquire()
            self._waiters.append(waiter)
            depth = _let_go(self._lock)
            try:
                acquire(waiter, min(timeout_s, _RECHECK_S))
            finally:
                _have_again(self._lock, depth)
                with suppress(ValueError):  # told
                    self._waiters.remove(waiter)

    def wait_until(
        self,
        is_so: Callable[[], bool],
        what: str,
        timeout_s: float = PATIENCE_S,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait, under the lock, until it is so. When nothing has come of it for that long, and
        `progress` has said the same all the time, a `StoreTimeout` tells `what` was waited for.
        """
        until_s, seen = time.monotonic() + timeout_s, progress()
        while not is_so():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise StoreTimeout(
                    f"{what}: nothing has come of it for {timeout_s:g} s; a drive, a file system "
                    "or a rank does not answer (see dmesg, and what other ranks say): wait for it "
                    "again, or end the process",
                    operation=what,
                )
            self.wait(left_s)
            if (now := progress()) != seen:
                until_s, seen = time.monotonic() + timeout_s, now

    def notify_all(self) -> None:
        """It has changed. Under the lock or, at the risk of telling late, without: a finalizer may
        do this.
        """
        with suppress(IndexError):  # nobody is left
            while True:
                self._waiters.popleft().release()


def _let_go(lock: Lock) -> Any:
    save = getattr(lock, "_release_save", None)  # of one that a thread may hold several times
    return lock.release() if save is None else save()


def _have_again(lock: Lock, depth: Any) -> None:
    restore = getattr(lock, "_acquire_restore", None)
    if restore is None:
        lock.acquire()
    else:
        restore(depth)


class Flag:
    """Something that happens once, and that threads wait for."""

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
        """Until it has happened; as `Gate.wait_until`."""
        with self._lock:
            self._gate.wait_until(lambda: self.is_set, what, timeout_s, progress)
