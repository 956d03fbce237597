"""Output of results to stdout and of messages to stderr, which may be full, closed, or unread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from offload.core.errors import OffloadError


class OutputError(OffloadError):
    """An error for a result that cannot be written to stdout."""


@contextmanager
def results() -> Iterator[TextIO]:
    """Provide stdout while the block runs, and flush it at the end.

    Raises `OutputError` if there is no stdout or a write fails; a BrokenPipeError, from a reader
    that has closed the pipe, passes unchanged.
    """
    # sys.stdout is None if Python was started without one (`>&-`).
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise OutputError("stdout is closed, so the result cannot be written; do not close it")
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
    """Print an error message as one line on stderr; do nothing if stderr cannot be written to."""
    if sys.stderr is not None:
        try:
            print(f"offload: error: {message}", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)


def drop(stream: TextIO | None) -> None:
    """Redirect a stream to the null device. Otherwise Python would fail again when it flushes the
    stream's buffer at exit.
    """
    if stream is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
