"""Tickets: futures, one for each asynchronous act.

Code that starts an asynchronous act returns a ticket. The ticket ends once, with a result or an
error, and is waited for once, in the thread that wants the result; the error is raised there. A
follow-up is chained with `then`. An error that no thread waits for is not lost: it is reported when
the ticket is garbage collected. A ticket does not know the producer of its result. Any thread.

Follow-ups run one after the other in the thread that ends the act, which is often the only thread
that ends acts. So a wait in a follow-up is refused; it could hang for ever.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

from offload.core.errors import StateError, StoreTimeout
from offload.core.locks import acquire, uninterrupted

T = TypeVar("T")
U = TypeVar("U")


class GivenUp(StateError):
    """An act that was ended because its owner was closed. A wait raises it; without a wait it is
    not reported, since the caller that closed the owner knows.
    """


class TicketState(Enum):
    PENDING = "pending"  # the act is in flight
    DONE = "done"  # it has succeeded; the ticket holds the result
    FAILED = "failed"  # it has failed; the ticket holds the error
    COLLECTED = "collected"  # a wait or a follow-up has taken the result or the error

    __hash__ = object.__hash__  # members are singletons; Enum's own is Python code, and slow


MOVES = {
    TicketState.PENDING: {TicketState.DONE, TicketState.FAILED},
    TicketState.DONE: {TicketState.COLLECTED},
    TicketState.FAILED: {TicketState.COLLECTED},
    TicketState.COLLECTED: set(),
}


class Ticket(Generic[T]):
    """A future: the handle of one asynchronous act. `what` names the act in errors; `describe`
    lists the operations in flight for the message of a time-out.
    """

    __slots__ = (
        "__weakref__",
        "_behind",
        "_describe",
        "_error",
        "_gate",
        "_lock",
        "_next",
        "_result",
        "_state",
        "_taken",
        "_urged",
        "land",
        "urge",
        "what",
    )

    def __init__(self, what: str, describe: Callable[[], str] | None = None) -> None:
        self.what = what
        # Called when a wait for this ticket, or for one that depends on it, begins, in any thread:
        # must not block.
        self.urge: Callable[[], None] | None = None
        # Called instead if the wait is for this very ticket, in the waiting thread, with its time
        # limit: may block.
        self.land: Callable[[float | None], None] | None = None
        self._describe = describe
        self._state = TicketState.PENDING
        self._result: T | None = None
        self._error: BaseException | None = None
        self._taken = False  # claimed by a wait or a follow-up: a second one is refused
        self._urged = False
        self._behind: Ticket[Any] | None = None  # the ticket that must end before this one
        self._next: Callable[[], None] | None = None
        self._lock = threading.Lock()
        # Held until the act has ended. A lock costs a twentieth of an Event.
        self._gate = threading.Lock()
        self._gate.acquire()

    @classmethod
    def of(cls, result: T, what: str = "done already") -> Ticket[T]:
        """Make a ticket that has succeeded with `result`."""
        ticket: Ticket[T] = cls(what)
        ticket.finish(result)
        return ticket

    # --- for the producer -------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the act with `error`; run the follow-ups in this thread."""
        self.finish(None, error)  # type: ignore[arg-type]

    def finish(self, result: T, error: BaseException | None = None) -> None:
        """End the act with `result`, or with `error`; run the follow-ups in this thread."""
        state = TicketState.DONE if error is None else TicketState.FAILED
        with self._lock:
            if state not in MOVES[self._state]:
                raise self._illegal(state)
            self._state = state
            self._result = result
            self._error = error
            follow = self._next
            # An ended ticket refers to no other object: a reference cycle would keep it, and its
            # error, until a garbage collection.
            self._next = self.urge = self.land = None
            self._behind = None
        self._gate.release()
        if follow is not None:
            _run(follow)

    # --- for the consumer -------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the act has ended, with a result or an error. Does not block."""
        return self._state is not TicketState.PENDING

    @property
    def state(self) -> TicketState:
        return self._state

    @uninterrupted
    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the act has ended; return its result or raise its error. Only once.

        A time-out raises `StoreTimeout` and leaves the ticket as it was: the caller may wait again.
        """
        if self._state is TicketState.PENDING:
            self._await(timeout_s)
        else:
            self._claim()
        return self._collect()

    def _await(self, timeout_s: float | None) -> None:
        """Claim the ticket, and block until the act has ended."""
        if _here.queue is not None:
            raise StateError(
                f"{self.what}: waited for in a follow-up, whose thread may be the one that has to "
                "end it; return the ticket from the action, or chain with then"
            )
        self._claim()
        try:
            left_s = math.inf if timeout_s is None else max(timeout_s, 0.0)
            land = self.land  # None once the act has ended
            if land is None:
                self._hurry()
            else:
                begin_s = time.monotonic()
                land(timeout_s)
                # Another thread may have seen the end, and be about to call `finish` or `fail`.
                left_s = max(0.0, left_s - (time.monotonic() - begin_s))
            # An interrupted wait may have acquired the gate of an act that has ended.
            ended = self._state is not TicketState.PENDING or acquire(self._gate, left_s)
        except BaseException:  # Ctrl-C: the act goes on, and may be waited for again
            self._unclaim()
            raise
        if not ended:
            self._unclaim()
            table = f"; in flight: {self._describe()}" if self._describe else ""
            raise StoreTimeout(
                f"{self.what}: not done after {timeout_s:g} s{table}", operation=self.what
            )

    def then(self, action: Callable[[T], U | Ticket[U]], what: str | None = None) -> Ticket[U]:
        """Chain `action` to this act and return a ticket for it. `action` runs when this act has
        succeeded, in the thread that ended it, or in this thread if it has ended already.

        `action` must not block; a wait in it is refused. It may return a ticket: then the new
        ticket ends as that does. When this act fails, the new ticket fails with the same error and
        `action` is not called.
        """
        self._claim()
        following: Ticket[U] = Ticket(what or self.what, self._describe)
        following._behind = self

        def go_on() -> None:
            try:
                result = action(self._collect())
                if isinstance(result, Ticket):
                    result._hand_over_to(following)
                    return
            except BaseException as error:
                following.fail(error)
                return
            following.finish(result)

        self._call_at_end(go_on)
        return following

    def _hand_over_to(self, *others: Ticket[T]) -> None:
        """End `others` with the result or error of this ticket."""
        self._claim()
        for other in others:
            other._behind = self
            if other._urged:
                self._hurry()

        def pass_on() -> None:
            try:
                result = self._collect()
            except BaseException as error:
                for other in others:
                    other.fail(error)
            else:
                for other in others:
                    other.finish(result)

        self._call_at_end(pass_on)

    def _hurry(self) -> None:
        """Tell the producers of this ticket, and of all that it depends on, that a thread waits."""
        ticket: Ticket[Any] | None = self
        while ticket is not None:
            ticket._urged = True
            urge = ticket.urge  # None once the act has ended
            if urge is not None:
                urge()
            ticket = ticket._behind

    def _call_at_end(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._state is TicketState.PENDING:
                self._next = function
                return
        _run(function)

    def _claim(self) -> None:
        with self._lock:
            if self._taken:
                raise StateError(f"{self.what}: this ticket has been waited for already; wait once")
            self._taken = True

    def _unclaim(self) -> None:
        with self._lock:
            self._taken = False

    def _collect(self) -> T:
        with self._lock:
            result, error = self._result, self._error
            self._result = self._error = None  # a ticket that is kept must not keep buffers alive
            if TicketState.COLLECTED not in MOVES[self._state]:
                raise self._illegal(TicketState.COLLECTED)
            self._state = TicketState.COLLECTED
        if error is None:
            return result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a cycle

    def _illegal(self, state: TicketState) -> StateError:
        return StateError(f"{self.what}: {self._state.name} -> {state.name} is not a legal move")

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is None or isinstance(error, GivenUp):
            return
        # No wait has raised it: report it, as Python does for errors that it cannot raise.
        message = f"{self.what}: never waited for"
        if sys.unraisablehook is not sys.__unraisablehook__:
            sys.unraisablehook(_Unraisable(type(error), error, error.__traceback__, message, self))
        elif sys.stderr is not None:  # Python's own hook takes only arguments that Python made
            print(f"{message}: {self!r}", file=sys.stderr)
            traceback.print_exception(type(error), error, error.__traceback__)

    def __repr__(self) -> str:
        return f"<Ticket {self.what}: {self._state.value}>"


class _Unraisable:
    """A replacement for the argument of sys.unraisablehook, whose type cannot be instantiated."""

    err_msg: str | None

    def __init__(self, kind: Any, value: Any, trace: Any, message: str, thing: Any) -> None:
        self.exc_type, self.exc_value, self.exc_traceback = kind, value, trace
        self.err_msg, self.object = message, thing


class _FollowUps(threading.local):
    """The queue of functions that this thread has still to call; None: it is in no follow-up."""

    queue: deque[Callable[[], None]] | None = None


_here = _FollowUps()


def in_follow_up() -> bool:
    """Return whether this thread runs the follow-up of a ticket, and so must not wait."""
    return _here.queue is not None


def _run(function: Callable[[], None]) -> None:
    """Call `function` and all follow-ups of it, in a loop: chains may be longer than the stack."""
    if _here.queue is not None:
        _here.queue.append(function)
        return
    queue = _here.queue = deque([function])
    interruption = None
    while queue:
        try:
            queue.popleft()()
        except BaseException as error:  # from a signal handler: the other follow-ups must still run
            interruption = error
    _here.queue = None
    if interruption is not None:
        raise interruption


def split(ticket: Ticket[T]) -> tuple[Ticket[T], Ticket[T]]:
    """Make two tickets that end as `ticket` does, for two waiting threads."""
    both: tuple[Ticket[T], Ticket[T]] = (
        Ticket(ticket.what, ticket._describe),
        Ticket(ticket.what, ticket._describe),
    )
    ticket._hand_over_to(*both)
    return both
