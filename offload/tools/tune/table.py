"""The tuner's live table on stderr: a line for each trial, and on a terminal one more below them
that is overwritten while a trial runs.
"""

from __future__ import annotations

from typing import TextIO

from offload.planning.profile import Tuning
from offload.tools.tune.search import Search, TunedTrial, spread_s

_TICK_S = 0.5
_WIDTH = 110
_KNOBS_WIDTH = 46


def describe(tuning: Tuning, layer_bytes: int | None) -> str:
    """Format a tuning as in `depth 4, chunk 512Ki, units x2`."""
    parts = []
    if tuning.prefetch_depth is not None:
        parts.append(f"depth {tuning.prefetch_depth}")
    if tuning.chunk_numel is not None:
        parts.append(f"chunk {_elements(tuning.chunk_numel)}")
    if tuning.queue_depth is not None:
        parts.append(f"queue {tuning.queue_depth}")
    if tuning.unit_bytes is not None:
        parts.append(f"units x{tuning.unit_bytes / (layer_bytes or tuning.unit_bytes):.3g}")
    if tuning.threads is not None:
        parts.append(f"threads {tuning.threads}")
    if tuning.activations is not None:
        parts.append(f"activations {tuning.activations}")
    return ", ".join(parts) or "all derived"


def _elements(numel: int) -> str:
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if numel % factor == 0:
            return f"{numel // factor}{unit}"
    return str(numel)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class TrialTable:
    """A table of trials, printed as they end. stream: None prints nothing; when its reader closes
    it, tuning goes on.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_live = stream is not None and stream.isatty()
        self._told_s = 0.0
        self.layer_bytes: int | None = None
        self.search: Search | None = None

    def head(self) -> None:
        self._line(
            f"{'trial':>5}  {'knobs':<{_KNOBS_WIDTH}} {'s a step':>16}  stalls  {'best':>8}  left"
        )

    def say(self, text: str) -> None:
        self._line(text)

    def add(self, trial: TunedTrial) -> None:
        """Print the line of a trial that has ended."""
        knobs = f"{trial.number:>5}  {describe(trial.tuning, self.layer_bytes):<{_KNOBS_WIDTH}} "
        measured = trial.measured
        if measured.failure is not None:
            self._line(f"{knobs} failed: {measured.failure}")
            return
        time = f"{measured.step_s:.4g} ± {spread_s(measured.seconds):.2g}"
        self._line(f"{knobs}{time:>16}  {measured.stall_share:>5.0%}   {self._state()}")

    def tick(self, tuning: Tuning, spent_s: float) -> None:
        """Update the line of the trial that runs, at most every `_TICK_S` seconds."""
        if not self._is_live or abs(spent_s - self._told_s) < _TICK_S:
            return
        self._told_s = spent_s
        knobs = describe(tuning, self.layer_bytes)
        text = (
            f"  ...  {knobs:<{_KNOBS_WIDTH}} {clock(spent_s):>16}          {self._state(spent_s)}"
        )
        self._write(f"\r{text[:_WIDTH]:<{_WIDTH}}")

    def end(self) -> None:
        """Clear the line of the running trial."""
        if self._is_live:
            self._write("\r" + " " * _WIDTH + "\r")

    def _state(self, spent_s: float = 0.0) -> str:
        if self.search is None:
            return ""
        best_s = self.search.step_s(self.search.best)
        return f"{best_s:>8.4g}  {clock(max(0.0, self.search.left_s - spent_s))}"

    def _line(self, text: str) -> None:
        self._write((f"\r{text:<{_WIDTH}}" if self._is_live else text).rstrip(" ") + "\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # its reader has closed it
            self._stream = None
