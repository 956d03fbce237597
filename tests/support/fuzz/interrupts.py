"""Ctrl-C at the n-th moment at which the package can be interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import offload
from support.interrupts import Moments

_PACKAGE = str(Path(offload.__file__).parent)
_INSTRUCTIONS = 6  # about, from one moment at which Python runs signal handlers to the next


@contextmanager
def interrupt_within(instruction: int) -> Iterator[Moments]:
    """Raise SIGINT in this thread about so many instructions of the package from here."""
    with Moments(1 + instruction // _INSTRUCTIONS, _is_ours) as moments:
        yield moments


def _is_ours(code: CodeType) -> bool:
    # Python 3.11 keeps what the frame of a generator expression is about to yield, for ever.
    return code.co_filename.startswith(_PACKAGE) and code.co_name != "<genexpr>"
