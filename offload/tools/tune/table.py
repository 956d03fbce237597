"""The tuner's live table on stderr: a line for each trial, and on a terminal one more below them
that is overwritten while a trial runs.
"""

from __future__ import annotations

from offload.integrations.screen import StatusLine
from offload.planning.profile import Tuning
from offload.tools.tune.search import Search, TunedTrial, spread_s

_KNOBS_WIDTH = 46


def describe(tuning: Tuning, layer_bytes: int | None) -> str:
    """Format a tuning as in `depth 4, chunk 512Ki, units x2`."""
    numel, nbytes = tuning.chunk_numel, tuning.unit_bytes
    values = {
        "depth": tuning.prefetch_depth,
        "chunk": numel and _elements(numel),
        "queue": tuning.queue_depth,
        "units": nbytes and f"x{nbytes / (layer_bytes or nbytes):.3g}",
        "threads": tuning.threads,
        "activations": tuning.activations,
    }
    given = [f"{name} {value}" for name, value in values.items() if value is not None]
    return ", ".join(given) or "all derived"


def _elements(numel: int) -> str:
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if numel % factor == 0:
            return f"{numel // factor}{unit}"
    return str(numel)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class TrialTable:
    """A table of trials, printed as they end, above the status line of the one that runs."""

    def __init__(self, line: StatusLine) -> None:
        self.line = line
        self.layer_bytes: int | None = None
        self.search: Search | None = None

    def head(self) -> None:
        self.line.say(
            f"{'trial':>5}  {'knobs':<{_KNOBS_WIDTH}} {'s a step':>16}  stalls  {'best':>8}  left"
        )

    def add(self, trial: TunedTrial) -> None:
        """Print the line of a trial that has ended."""
        knobs = f"{trial.number:>5}  {describe(trial.tuning, self.layer_bytes):<{_KNOBS_WIDTH}} "
        measured = trial.measured
        if measured.failure is not None:
            self.line.say(f"{knobs} failed: {measured.failure}")
            return
        time = f"{measured.step_s:.4g} ± {spread_s(measured.seconds):.2g}"
        self.line.say(f"{knobs}{time:>16}  {measured.stall_share:>5.0%}   {self._state()}")

    def tick(self, tuning: Tuning, spent_s: float) -> None:
        """Update the line of the trial that runs."""
        knobs = describe(tuning, self.layer_bytes)
        state = f"{clock(spent_s):>16}          {self._state(spent_s)}"
        self.line.update(f"  ...  {knobs:<{_KNOBS_WIDTH}} {state}")

    def _state(self, spent_s: float = 0.0) -> str:
        if self.search is None:
            return ""
        best_s = self.search.step_s(self.search.best)
        return f"{best_s:>8.4g}  {clock(max(0.0, self.search.left_s - spent_s))}"
