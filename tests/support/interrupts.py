"""Ctrl-C at any place between two instructions of Python."""

from __future__ import annotations

import dis
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


def heed_interrupts() -> None:
    """Have SIGINT raise KeyboardInterrupt.

    A program that a shell runs in the background ignores SIGINT, and so would all programs that
    tests start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupt_at(instruction: int, *kinds: type) -> Iterator[list[bool]]:
    """Raise KeyboardInterrupt before the n-th instruction of the methods of `kinds`, as a signal
    handler raises it. Gives a list that is empty as long as it was not reached.
    """
    methods = [method for kind in kinds for method in vars(kind).values()]
    codes = {method.__code__ for method in methods if hasattr(method, "__code__")}
    reached: list[bool] = []
    left = itertools.count(instruction, -1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left) == 1:
            reached.append(True)
            raise KeyboardInterrupt
        return trace

    # Python 3.12 tells of instructions only where a frame had asked for them before tracing began.
    sys._getframe().f_trace_opcodes = True
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(before)


# --- where Python itself would run a signal handler ----------------------------------------------

# After these instructions, and where a function begins. Not after BEFORE_WITH: that is why `with`
# of a lock that C has made is safe.
_LOOKS = {
    dis.opmap[name]
    for name in (
        "RESUME",
        "CALL",
        "CALL_KW",
        "CALL_FUNCTION_EX",
        "JUMP_BACKWARD",
    )
    if name in dis.opmap
}


class Code:
    """The instructions of a function, and the handlers of what they raise."""

    def __init__(self, code: CodeType) -> None:
        self._operations = code.co_code  # a copy each time
        entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
        self._handlers = [(entry.start, entry.end, entry.target) for entry in entries]

    def looks_between(self, before: int, at: int) -> bool:
        """Return whether Python may run a signal handler between these two instructions, and a
        tracer can make it do so there.

        What a signal handler raises is raised by the first instruction, what a tracer raises by the
        second. If the first is the last one of a `with` or a `try`, another handler would catch it.
        """
        is_look = self._operations[before] in _LOOKS
        return is_look and self._handler_of(before) == self._handler_of(at)

    def _handler_of(self, at: int) -> int | None:
        return next((target for begin, end, target in self._handlers if begin <= at < end), None)


Place = tuple[CodeType, int, CodeType | None]  # where, and the caller if `is_shared` says so
SHARED = ("threading.py", "contextlib.py", "locks.py")


class Moments:
    """The moments in the main thread at which a signal handler may run, one after the other.

    at: the number of the moment at which SIGINT comes, or the place at which it comes, the first
    time. It is a real signal, so that a handler other than Python's runs, too.
    only: the code in which moments count; None: all code.
    """

    def __init__(
        self,
        at: int | Place | None = None,
        only: Callable[[CodeType], bool] | None = None,
    ) -> None:
        self.count = 0
        self.places: dict[Place, int] = {}  # that were passed, with the number of the first time
        self.came_at: Place | None = None
        self._at, self._only = at, only
        self._known: dict[CodeType, Code | None] = {}  # None: it does not count
        self._last: dict[FrameType, int] = {}  # the instruction before

    def _begin(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in self._known:
            is_mine = code.co_filename == __file__
            is_wanted = not is_mine and (self._only is None or self._only(code))
            self._known[code] = Code(code) if is_wanted else None
        if self._known[code] is None:
            return None
        frame.f_trace_opcodes = True
        return self._look

    def _look(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode":
            return self._look
        code, at = frame.f_code, frame.f_lasti
        before, known = self._last.get(frame), self._known[code]
        self._last[frame] = at
        if before is not None and known is not None and known.looks_between(before, at):
            caller = frame.f_back if is_shared(code) else None
            self._pass((code, at, caller.f_code if caller else None))
        return self._look

    def _pass(self, place: Place) -> None:
        self.count += 1
        self.places.setdefault(place, self.count)
        if self.came_at is None and self._at in (self.count, place):
            self.came_at = place
            signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Moments:
        sys._getframe().f_trace_opcodes = True  # as above
        sys.settrace(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def __str__(self) -> str:
        return "nowhere" if self.came_at is None else name_of(self.came_at)


def is_shared(code: CodeType) -> bool:
    return os.path.basename(code.co_filename) in SHARED


def name_of(place: Place) -> str:
    code, at, caller = place
    line = next((n for begin, end, n in code.co_lines() if begin <= at < end), None)
    called = f", called by {caller.co_qualname}" if caller else ""
    return f"{os.path.basename(code.co_filename)}:{line} {code.co_qualname}, {at}{called}"


# --- at any time ---------------------------------------------------------------------------------


class Alarm:
    """A real SIGINT after some time, at any place of the main thread."""

    def __init__(self, delay_s: float) -> None:
        self.came_at: Place | None = None  # where the signal was noticed
        self._delay_s = delay_s

    def _ring(self, number: int, frame: FrameType | None) -> None:
        assert frame is not None
        self.came_at = frame.f_code, frame.f_lasti, None
        signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Alarm:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._delay_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def __str__(self) -> str:
        return "nowhere" if self.came_at is None else name_of(self.came_at)
