"""Where results and messages go: stdout and stderr, which may be full, closed, or unread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from offload.core.errors import OffloadError


class OutputError(OffloadError):
    """The result could not be written to stdout."""


@contextmanager
def results() -> Iterator[TextIO]:
    """stdout, written out at the end of the block.

    A write that fails is an OutputError; a reader that went away stays a BrokenPipeError.
    """
    # Python has no stdout when it was started without one (`>&-`).
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise OutputError("stdout is closed, so the result has nowhere to go; do not close it")
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(
            f"stdout: the result could not be written: {reason}; send it elsewhere or make room"
        ) from error


def complain(message: str) -> None:
    """One line on stderr, if anybody can be told at all."""
    if sys.stderr is not None:
        try:
            print(f"offload: error: {message}", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)


def drop(stream: TextIO | None) -> None:
    """Lead a stream nowhere: what is left in its buffer would fail again when Python ends."""
    if stream is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
