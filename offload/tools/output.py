"""The output of commands: results on stdout, and messages and a status line on stderr; each of them
may be full, closed, or unread. Tables and sizes as text.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, TextIO

from offload.core.config import format_size
from offload.core.errors import OffloadError
from offload.integrations.screen import StatusLine, encodable

EXIT_PROBLEM: Final = 1  # the command has found one
EXIT_ERROR: Final = 2  # it could not do its work
TABLE_WIDTH = 100  # columns
_BETWEEN = "  "


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


def print_result(told: Mapping[str, object] | Sequence[str], indent: int | None = None) -> None:
    """Print the result of a command on stdout: the one object of `--json`, without `indent` as one
    line, or lines of text; what it cannot encode, such as a path, as escapes.
    """
    is_json = isinstance(told, Mapping)
    lines = [json.dumps(told, allow_nan=False, indent=indent)] if is_json else told
    with results() as stream:
        for line in lines:
            print(encodable(line, stream), file=stream)


def complain(message: str, kind: str = "error") -> None:
    """Print an error message as one line on stderr; do nothing if stderr cannot be written to."""
    status_line().say(f"offload: {kind}: {message}")


def status_line(every_s: float = 0.0) -> StatusLine:
    """Make a status line on stderr. On a stderr that cannot be written to it shows nothing."""
    return StatusLine(sys.stderr, every_s, failed=lambda error: drop(sys.stderr))


def drop(stream: TextIO | None) -> None:
    """Redirect a stream to the null device. Otherwise Python would fail again when it flushes the
    stream's buffer at exit.
    """
    if stream is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def table(rows: Sequence[Sequence[str]], width: int | None = TABLE_WIDTH) -> list[str]:
    """Format rows of equally many cells as lines with aligned columns. width: at which the last
    cell is wrapped, below itself and not at hyphens, as in --gpus; None: it is not.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for *cells, text in rows:
        head = "".join(f"{cell:<{n}}{_BETWEEN}" for cell, n in zip(cells, widths, strict=False))
        lines += [f"{head}{text}"] if width is None else _wrapped(head, text, width)
    return lines


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    ) or [head.rstrip()]


def count_statuses(kind: type[StrEnum], rows: Iterable[Any]) -> dict[str, int]:
    """Count the rows of each status of `kind`, zeros included."""
    counts = Counter(row.status for row in rows)
    return {status.value: counts[status] for status in kind}


def show_size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_size(nbytes)
