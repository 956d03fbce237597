"""The output of `offload bench`: warnings, progress, and the table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offload.core.config import format_size
from offload.core.strict_json import printable
from offload.integrations.screen import StatusLine
from offload.planning.profile import Profile
from offload.tools.output import table

if TYPE_CHECKING:
    from offload.tools.bench.figure import Figure
    from offload.tools.bench.survey import SurveyResult

_BAR = 20
_SCALES = {  # by unit: the unit of the table, and how many of the first it has
    "bytes/s": ("GB/s", 1e9),
    "flop/s": ("GFLOP/s", 1e9),
    "tokens/s": ("tokens/s", 1.0),
    "s": ("s", 1.0),
    "share": ("of alone", 1.0),
}


class BenchProgress:
    """A progress bar on a terminal; elsewhere a line for each finished figure."""

    def __init__(self, line: StatusLine) -> None:
        self.line = line
        self._name = ""

    def begin(self, name: str) -> None:
        self._name = printable(name)
        self.line.erase()
        self.at(0.0)

    def at(self, share: float) -> None:
        done = round(share * _BAR)
        self.line.update(f"[{'#' * done}{'-' * (_BAR - done)}] {share:4.0%} {self._name}")

    def done(self, figure: Figure) -> None:
        if not self.line.is_terminal:
            self.line.say(f"{printable(figure.name)}: {show(figure)}")


def show(figure: Figure) -> str:
    """Format a figure as `3.21 GB/s +- 4% (5 runs)`, in ASCII, which every terminal can show."""
    unit, scale = _SCALES[figure.unit]
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
        rows.append(("  waited", f"{found.step.stall_share:.0%} of the last iteration"))
    if most_written_bytes:
        size, most = format_size(found.written_bytes), format_size(most_written_bytes)
        rows.append(("written to drives", f"{size} of at most {most}"))
    where = "not written" if saved is None else printable(saved)
    count = len(made.tuned)
    kept = f", with the {count} tuning{'s' if count > 1 else ''} it had" if count and saved else ""
    rows.append(("profile", where + kept))
    return table(rows, width=None) + [f"note: {printable(note)}" for note in found.notes]
