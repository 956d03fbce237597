"""The tuner's picture: seconds of an iteration and the share of it spent waiting, over the prefetch
depth, with the physical limit as a line.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.core.portable import write_private
from offload.planning.profile import Tuning
from offload.tools.tune.search import Measured, TunedTrial, spread_s

DEPTH = "prefetch_depth"
NOT_INSTALLED = "no picture: matplotlib is not installed (pip install offload[plots])"
_DERIVED = "derived"


@dataclass(frozen=True)
class CurvePoint:
    """The best trial with one value of the drawn knob."""

    label: str
    step_s: float
    spread_s: float
    stall_share: float
    is_best: bool


def drawn_field(trials: Sequence[TunedTrial]) -> str:
    """Return the field to draw: the prefetch depth, or where only one was tried, the field with the
    most values.
    """
    counts = {
        field.name: len({getattr(t.tuning, field.name) for t in trials}) for field in fields(Tuning)
    }
    if counts[DEPTH] > 1:
        return DEPTH
    return max(counts, key=lambda name: counts[name])


def make_points(trials: Sequence[TunedTrial], best: Tuning, field: str) -> list[CurvePoint]:
    """Make a point for each value of `field`, derived first: the best trial that has the value,
    among all values of the other fields.
    """
    found: dict[Any, tuple[Tuning, Measured]] = {}
    for trial in trials:
        value, measured = getattr(trial.tuning, field), trial.measured
        if measured.failure is None and (
            value not in found or measured.step_s < found[value][1].step_s
        ):
            found[value] = trial.tuning, measured
    ordered = sorted(found, key=lambda value: (value is not None, value))
    return [
        CurvePoint(
            _DERIVED if value is None else str(value),
            found[value][1].step_s,
            spread_s(found[value][1].seconds),
            found[value][1].stall_share,
            value == getattr(best, field),
        )
        for value in ordered
    ]


def draw(
    trials: Sequence[TunedTrial], best: Tuning, limit_s: float, title: str, path: Path
) -> str | None:
    """Write the picture, readable by its owner only. Return a message if matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return NOT_INSTALLED
    field = drawn_field(trials)
    points = make_points(trials, best, field)
    figure, left = pyplot.subplots(figsize=(8, 4.5))
    try:
        _draw_points(left, points, field, limit_s)
        left.set_title(title)
        figure.tight_layout()
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=120, format="png")
        write_private(path, drawn.getvalue())  # whole or not at all
    finally:
        pyplot.close(figure)
    return None


def _draw_points(left: Any, points: Sequence[CurvePoint], field: str, limit_s: float) -> None:
    at = range(len(points))
    right = left.twinx()
    right.bar(at, [100 * p.stall_share for p in points], color="0.88", width=0.6)
    right.set(ylabel="share that waits, % (bars)", ylim=(0, 100))
    given = [n for n in at if points[n].label != _DERIVED]
    for numbers, label in (([n for n in at if n not in given], None), (given, "an iteration")):
        left.errorbar(
            numbers,
            [points[n].step_s for n in numbers],
            yerr=[points[n].spread_s for n in numbers],
            marker="o",
            capsize=3,
            color="C0",
            label=label,
        )
    chosen = [n for n in at if points[n].is_best]
    left.plot(
        chosen, [points[n].step_s for n in chosen], "*", color="C1", markersize=16, label="chosen"
    )
    left.axhline(limit_s, linestyle="--", color="black", label="physical limit")
    left.set(xlabel=field.replace("_", " "), ylabel="seconds", ylim=(0, None))
    left.set_xticks(at, labels=[p.label for p in points])
    left.set_zorder(right.get_zorder() + 1)  # lines above bars
    left.patch.set_visible(False)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
