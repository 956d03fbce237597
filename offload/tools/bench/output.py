"""The output of `offload bench`: warnings, progress, and the table at the end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from offload.core.config import format_size
from offload.core.strict_json import printable
from offload.planning.profile import Profile
from offload.tools.output import drop

if TYPE_CHECKING:
    from offload.tools.bench.figure import Figure
    from offload.tools.bench.survey import SurveyResult

_EVERY_S = 0.1
_WIDTH = 79
_BAR = 20
_SCALES = {  # by unit: the unit of the table, and how many of the first it has
    "bytes/s": ("GB/s", 1e9),
    "flop/s": ("GFLOP/s", 1e9),
    "tokens/s": ("tokens/s", 1.0),
    "s": ("s", 1.0),
    "share": ("of alone", 1.0),
}


def warn(message: str) -> None:
    """Print a warning as one line on stderr."""
    _write(sys.stderr, f"offload: warning: {message}\n")


def _write(stream: TextIO | None, text: str) -> None:
    """Write `text` and flush; None: do nothing. A stream that cannot be written to is dropped."""
    if stream is None:
        return
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        drop(stream)


class BenchProgress:
    """A progress bar, redrawn in place on a terminal; elsewhere a line for each finished figure."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._name = ""
        self._told_s = float("-inf")
        self._is_open = False

    def say(self, text: str) -> None:
        """Print a line that stays above the progress bar."""
        self.end()
        _write(self._stream, f"{text}\n")

    def begin(self, name: str) -> None:
        self._name = printable(name)
        self._told_s = float("-inf")
        self.at(0.0)

    def at(self, share: float) -> None:
        now_s = time.monotonic()
        if not self._is_terminal or now_s - self._told_s < _EVERY_S:
            return
        self._told_s = now_s
        done = round(share * _BAR)
        text = f"[{'#' * done}{'-' * (_BAR - done)}] {share:4.0%} {self._name}"
        _write(self._stream, f"\r{text[:_WIDTH]:<{_WIDTH}}")
        self._is_open = True

    def done(self, figure: Figure) -> None:
        if not self._is_terminal:
            _write(self._stream, f"{printable(figure.name)}: {show(figure)}\n")

    def end(self) -> None:
        """Erase the progress bar, if there is one."""
        if self._is_open:
            self._is_open = False
            _write(self._stream, "\r" + " " * _WIDTH + "\r")


def show(figure: Figure) -> str:
    """Format a figure as `3.21 GB/s +- 4% (5 runs)`, in ASCII, which every terminal can show."""
    unit, scale = _SCALES[figure.unit.value]
    share = figure.spread / figure.median if figure.median else 0.0
    runs = f"{figure.runs} run{'s' if figure.runs > 1 else ''}"
    return f"{figure.median / scale:.3g} {unit} +- {share:.0%} ({runs})"


def describe(
    found: SurveyResult, most_written_bytes: int, made: Profile, saved: Path | None
) -> list[str]:
    """Return the lines of the table and, after them, the notes on the measurements."""
    rows = [("machine", made.name)]
    rows += [(printable(figure.name), show(figure)) for figure in found.figures]
    if found.step is not None and found.step.stall_share is not None:
        rows.append(("  waited for parameters", f"{found.step.stall_share:.0%} of the last step"))
    if most_written_bytes:
        size, most = format_size(found.written_bytes), format_size(most_written_bytes)
        rows.append(("written to drives", f"{size} of at most {most}"))
    where = "not written" if saved is None else printable(saved)
    count = len(made.tuned)
    kept = f", with the {count} tuning{'s' if count > 1 else ''} it had" if count and saved else ""
    rows.append(("profile", where + kept))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return lines + [f"note: {printable(note)}" for note in found.notes]
