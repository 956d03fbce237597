"""Ctrl-C at any place: between two instructions of Python's, one after the other."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupt_at(instruction: int, *kinds: type) -> Iterator[list[bool]]:
    """KeyboardInterrupt before the n-th instruction of the methods of `kinds`, as a signal handler
    raises it. Gives a list that is empty as long as it was not reached.
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
