"""The report as a picture for papers: one iteration, its memory, and where its seconds went.

Needs matplotlib, which is imported on use. Two runs are side by side, in one scale.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any, Final

from offload.core.config import format_size
from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.core.timeline import STEP, Event, in_turn
from offload.telemetry.iterations import IterationSummary
from offload.telemetry.run_file import Run
from offload.telemetry.words import show_part, show_seconds
from offload.tools.html_report.timeline import (
    ROWS,
    first_view,
    kind_of,
    kind_of_part,
    tiers_of,
)

DPI: Final = 300
# Safe for colour-blind readers; the colours of page.css on white.
COLOURS: Final = {
    "forward": "#0072b2",
    "backward": "#3797d0",
    "evaluation": "#6b7280",
    "update": "#008a64",
    "waiting": "#d55e00",
    "to-device": "#8a7600",
    "to-host": "#7f7f7f",
    "read": "#c27e00",
    "write": "#c0639a",
}
_BANDS: Final = ("#9db4c8", "#5d83a6", "#2f5577", "#16324b")
_MOST_PARTS: Final = 8
_LINES: Final = {"forward": 0.4, "backward": 0.4}  # between units


def make_picture(runs: Sequence[Run], paths: Sequence[str]) -> bytes:
    """Make a PNG. Raises `ConfigError` where matplotlib cannot be imported."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--png: matplotlib cannot be imported ({error}); pip install 'offload[plots]'"
        ) from error
    # Names are untrusted: no math in them, and letters that the font lacks are boxes.
    plain: dict[Any, Any] = {"text.parse_math": False, "font.size": 8, "hatch.linewidth": 0.4}
    with matplotlib.rc_context(plain), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure = Figure(figsize=(7.2 if len(runs) == 1 else 12, 7), layout="constrained")
        FigureCanvasAgg(figure)
        _fill(figure, runs, paths)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def _fill(figure: Any, runs: Sequence[Run], paths: Sequence[str]) -> None:
    axes = figure.subplots(3, len(runs), squeeze=False, height_ratios=(3, 1.6, 2))
    found = [run.iterations for run in runs]
    views = [first_view(run.events) for run in runs]
    span_s = max(end_s - begin_s for begin_s, end_s in views)
    longest_s = max((s for one in found for s in one.parts.values()), default=1.0) or 1.0
    for column, (run, one, (begin_s, _)) in enumerate(zip(runs, found, views, strict=True)):
        top, middle, bottom = (axes[row][column] for row in range(3))
        name = f"{'AB'[column]}: " if len(runs) > 1 else ""
        title = f"{name}{_short(run.about.title)} ({_short(paths[column])})"
        top.set_title(f"{title}\n{show_seconds(one.typical_s)} an iteration (median)", fontsize=9)
        _draw_timeline(top, run.events, begin_s, span_s)
        _draw_memory(middle, run, begin_s, span_s)
        _draw_parts(bottom, one, longest_s)


def _draw_timeline(axis: Any, events: Sequence[Event], begin_s: float, span_s: float) -> None:
    shown = [e for e in events if e.end_s > begin_s and e.begin_s < begin_s + span_s]
    kinds = {kind_of(event) for event in shown}
    rows = [(label, held) for label, held in ROWS if kinds & set(held)]
    for place, (_, held) in enumerate(rows):
        for kind in held:
            pieces = in_turn(event for event in shown if kind_of(event) == kind)
            spans = [(e.begin_s - begin_s, e.end_s - e.begin_s) for e in pieces]
            hatch = "////" if kind == "waiting" else None
            style = {"facecolors": COLOURS[kind], "hatch": hatch, "edgecolor": "white"}
            axis.broken_barh(spans, (place - 0.4, 0.8), linewidth=_LINES.get(kind, 0.0), **style)
    for step in (event for event in shown if event.row == STEP):
        axis.axvspan(step.begin_s - begin_s, step.end_s - begin_s, color="#00000012", zorder=0)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axis.set_xlim(0, span_s or 1.0)
    axis.set_xlabel("seconds; grey: step()")


def _draw_memory(axis: Any, run: Run, begin_s: float, span_s: float) -> None:
    """Draw the first tier that has a budget, or else the first."""
    sampled = tiers_of(run)
    tiers = [tier for tier in sampled if tier.budget_bytes] or sampled
    if not tiers:
        axis.text(0.5, 0.5, "no memory was sampled", ha="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    tier = tiers[0]
    times_s = [at_s - begin_s for at_s in tier.times_s]
    bands = [[n / 2**20 for n in band.nbytes] for band in tier.bands]
    labels = [_short(band.label) for band in tier.bands]
    colours = [_BANDS[n % len(_BANDS)] for n in range(len(bands))]
    axis.stackplot(times_s, *bands, labels=labels, colors=colours, step="post")
    if tier.budget_bytes:
        label = f"budget {format_size(tier.budget_bytes)}"
        axis.axhline(tier.budget_bytes / 2**20, color="black", linestyle="--", lw=0.8, label=label)
    axis.set_xlim(0, span_s or 1.0)
    axis.set_ylim(0, 1.1 * max(tier.peak_bytes, tier.budget_bytes or 0) / 2**20 or 1.0)
    axis.set_ylabel(f"{_short(tier.name)}, MiB")
    axis.legend(loc="lower right", fontsize=6)


def _draw_parts(axis: Any, found: IterationSummary, longest_s: float) -> None:
    parts = sorted(found.parts.items(), key=lambda item: -item[1])[:_MOST_PARTS]
    for place, (name, seconds) in enumerate(parts):
        kind = kind_of_part(name)
        hatch = "////" if kind == "waiting" else None
        axis.barh(place, seconds, color=COLOURS[kind], hatch=hatch, edgecolor="white", lw=0)
        axis.text(seconds + longest_s / 80, place, show_seconds(seconds), va="center", fontsize=7)
    axis.set_yticks(range(len(parts)), [_short(show_part(name)) for name, _ in parts])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.18 * longest_s)
    axis.set_xlabel("seconds of an iteration")


def _short(text: str) -> str:
    plain = printable(text)
    return plain if len(plain) <= 48 else f"{plain[:45]}..."
