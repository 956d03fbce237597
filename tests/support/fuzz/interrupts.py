"""Ctrl-C before the n-th instruction that the package runs, wherever that is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import offload

_PACKAGE = str(Path(offload.__file__).parent)


@contextmanager
def interrupt_within(instruction: int) -> Iterator[list[str]]:
    """KeyboardInterrupt as a signal handler raises it, in this thread. Gives a list that is empty
    as long as it was not reached, and then tells the place.
    """
    reached: list[str] = []
    left = instruction

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if reached or not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if frame.f_code.co_name == "<genexpr>":
            return None  # Python 3.11 keeps what such a frame is about to yield, for ever
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left <= 0:
                reached.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 wants one to have asked before
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(before)
