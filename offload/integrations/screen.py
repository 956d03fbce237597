"""The outputs that show a line which is rewritten all the time: a terminal, a notebook, a plain
file.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

_PLAIN_EVERY_S = 10.0  # least time between lines that are not overwritten
_NOTEBOOK_WIDTH = 160
_BETWEEN = " | "


class TextPart(Protocol):
    """A part of a line. rank: if the line is too short for all parts, those of the lowest rank are
    chosen first.
    """

    @property
    def text(self) -> str: ...

    @property
    def rank(self) -> int: ...


class Screen(Protocol):
    """An output that shows a line. every_s: the least time between two lines. One thread
    uses it.
    """

    every_s: float

    def show(self, parts: Sequence[TextPart]) -> None:
        """Show a line, in place of the previous one if the output can do that."""

    def end(self) -> None:
        """Leave the last line in place, so that other output begins below it. Idempotent."""


def fit(parts: Sequence[TextPart], width: int | None) -> str:
    """Join the parts to a line of at most `width` characters (None: of any length). Parts keep
    their order; if there is no room for all, those of the lowest rank are chosen first, and the
    first of these is cut if it must be.
    """
    if width is None:
        return _joined(parts)
    kept: list[TextPart] = []
    for part in sorted(parts, key=lambda part: part.rank):
        more = [one for one in parts if one is part or one in kept]
        if not kept or len(_joined(more)) <= width:
            kept = more
    return _joined(kept)[:width]


def _joined(parts: Sequence[TextPart]) -> str:
    return _BETWEEN.join(part.text for part in parts)


class TerminalScreen:
    """A terminal: one line, which is overwritten, as wide as the terminal is at the moment."""

    def __init__(self, out: TextIO, every_s: float) -> None:
        self.every_s = every_s
        self._out = out
        self._is_open = False

    def show(self, parts: Sequence[TextPart]) -> None:
        width = max(1, _columns(self._out) - 1)  # a full line would wrap to the next one
        self._out.write(f"\r{fit(parts, width):<{width}}")
        self._out.flush()
        self._is_open = True

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._out.write("\n")
            self._out.flush()


class PlainScreen:
    """A file or a pipe, where no line can be overwritten: it gets few lines."""

    def __init__(self, out: TextIO, every_s: float) -> None:
        self.every_s = max(every_s, _PLAIN_EVERY_S)
        self._out = out

    def show(self, parts: Sequence[TextPart]) -> None:
        self._out.write(f"{fit(parts, None)}\n")
        self._out.flush()

    def end(self) -> None:
        """Do nothing: each line ends in a newline."""


class NotebookScreen:
    """A notebook: one output of a cell, which is updated. display: IPython's function."""

    def __init__(self, display: Any, every_s: float) -> None:
        self.every_s = every_s
        self._display = display
        self._handle: Any = None

    def show(self, parts: Sequence[TextPart]) -> None:
        shown = {"text/plain": fit(parts, _NOTEBOOK_WIDTH)}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def end(self) -> None:
        """Do nothing: the output stays in the cell."""


class NoScreen:
    """A screen that shows nothing: another rank shows the line, or there is no stderr."""

    every_s = float("inf")

    def show(self, parts: Sequence[TextPart]) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing: no line was begun."""


def find_screen(out: TextIO | None, every_s: float) -> Screen:
    """Find the screen for `out`; None: the notebook that runs this code, else standard error."""
    display = _notebook_display() if out is None else None
    if display is not None:
        return NotebookScreen(display, every_s)
    stream: TextIO | None = sys.stderr if out is None else out
    if stream is None:  # Python was started without stderr
        return NoScreen()
    return TerminalScreen(stream, every_s) if stream.isatty() else PlainScreen(stream, every_s)


def _columns(out: TextIO) -> int:
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
