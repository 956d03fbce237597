"""A line that is rewritten all the time: in a terminal, in a notebook, in a plain file."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

_PLAIN_EVERY_S = 10.0  # least time between lines that are not overwritten
_NOTEBOOK_WIDTH = 160
_BETWEEN = " | "


class LinePart(NamedTuple):
    """A part of a line. rank: if the line is too short for all parts, those of the lowest rank are
    chosen first.
    """

    text: str
    rank: int


def fit(parts: Sequence[LinePart], width: int | None) -> str:
    """Join the parts to a line of at most `width` characters (None: of any length). Parts keep
    their order; if there is no room for all, those of the lowest rank are chosen first, and the
    first of these is cut if it must be.
    """
    if width is None:
        return _joined(parts)
    kept: list[LinePart] = []
    for part in sorted(parts, key=lambda part: part.rank):
        more = [one for one in parts if one is part or one in kept]
        if not kept or len(_joined(more)) <= width:
            kept = more
    return _joined(kept)[:width]


def _joined(parts: Sequence[LinePart]) -> str:
    return _BETWEEN.join(part.text for part in parts)


class StatusLine:
    """A status line on an output. A terminal overwrites it; any other output gets a new line each
    time. Lines that stay come above it. The end of a `with` block erases it. One thread uses it.

    out: None shows nothing. every_s, plain_every_s: the least time between two updates, on a
    terminal and elsewhere; infinite: no updates. plain_width: the most characters elsewhere.
    failed: is called when the output, closed or full, takes no more; then the line shows nothing.
    """

    def __init__(
        self,
        out: TextIO | None,
        every_s: float = 0.0,
        plain_every_s: float = math.inf,
        plain_width: int | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._out, self._failed, self._plain_width = out, failed, plain_width
        self.is_terminal = out is not None and out.isatty()
        self._every_s = every_s if self.is_terminal else plain_every_s
        self._shown_s = -math.inf
        self._shown_width = 0  # of the line that stands there now

    @property
    def width(self) -> int | None:
        """The most characters of the line; None: any number of them."""
        if not self.is_terminal:
            return self._plain_width
        return max(1, _columns(self._out) - 1)  # a full line would wrap to the next one

    @property
    def is_due(self) -> bool:
        """Whether the last line has been there for long enough."""
        if self._out is None or self._every_s == math.inf:
            return False
        return time.monotonic() - self._shown_s >= self._every_s

    def update(self, text: str) -> None:
        """Show `text` if the line is due."""
        if self.is_due:
            self.show(text)

    def show(self, text: str) -> None:
        """Show `text`, cut to the width, in place of the line before if the output can do that."""
        self._shown_s = time.monotonic()
        if not self.is_terminal:
            self._write(f"{text}\n")
            return
        self._shown_width = self.width or 0
        self._write(f"\r{text[: self._shown_width]:<{self._shown_width}}")

    def say(self, text: str) -> None:
        """Print a line that stays, above the status line."""
        self.erase()
        self._write(f"{text}\n")

    def erase(self) -> None:
        """Remove the line, if there is one."""
        if self._shown_width:
            self._write("\r" + " " * self._shown_width + "\r")
        self._shown_s, self._shown_width = -math.inf, 0

    def end(self) -> None:
        """Leave the last line in place, so that other output begins below it. Idempotent."""
        if self._shown_width:
            self._shown_width = 0
            self._write("\n")

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.erase()

    def _write(self, text: str) -> None:
        if self._out is None:
            return
        try:
            self._out.write(encodable(text, self._out))
            self._out.flush()
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._out, self._shown_width = None, 0
            self._failed(error)


def encodable(text: str, out: TextIO) -> str:
    """Return `text` with escapes for the characters that `out` cannot encode."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class _NotebookCell:
    """An output of a cell, which is updated, as a stream. display: IPython's function."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        shown = {"text/plain": text.removesuffix("\n")}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def flush(self) -> None:
        """Do nothing: a cell has no buffer."""


def find_screen(
    out: TextIO | None, every_s: float, failed: Callable[[Exception], None]
) -> StatusLine:
    """Find the status line for `out`; None: the notebook that runs this code, else stderr."""
    display = _notebook_display() if out is None else None
    if display is not None:
        cell: Any = _NotebookCell(display)
        return StatusLine(cell, every_s, every_s, _NOTEBOOK_WIDTH, failed)
    stream: TextIO | None = sys.stderr if out is None else out  # None: started without stderr
    return StatusLine(stream, every_s, max(every_s, _PLAIN_EVERY_S), failed=failed)


def _columns(out: Any) -> int:
    """Return the width of the terminal that `out` is; if `out` does not tell, that of the terminal
    that Python finds.
    """
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def _notebook_display() -> Any:
    """Return IPython's `display` if a notebook kernel runs this code; None in a terminal, and while
    IPython is not imported.
    """
    shell_of: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = shell_of() if callable(shell_of) else None
    if getattr(shell, "kernel", None) is None:
        return None
    return importlib.import_module("IPython.display").display
