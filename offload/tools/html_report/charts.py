"""Bar charts without a script: SVG whose sizes are attributes and whose colours are classes."""

from __future__ import annotations

from collections.abc import Sequence

from offload.tools.html_report.markup import Html, join, tag
from offload.tools.html_report.summary import IterationSummary
from offload.tools.html_report.words import show_seconds

_MOST_BARS = 200
_WIDTH, _HEIGHT = 100, 10


def bar(value: float, most: float, kind: str) -> Html:
    """Draw one horizontal bar, `value` of `most`. kind: its colour, a class of the style sheet."""
    share = min(1.0, max(0.0, value / most)) if most > 0 else 0.0
    wide = f"{share * _WIDTH:.2f}"
    inner = tag("rect", class_=f"fill-{kind}", width=wide, height=_HEIGHT)
    return _drawing(inner, _WIDTH, _HEIGHT, "bar")


def _drawing(inner: str, width: float, height: float, name: str) -> Html:
    return tag(
        "svg",
        inner,
        class_=name,
        viewBox=f"0 0 {width:g} {height:g}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )


def step_bars(iterations: Sequence[IterationSummary]) -> Html:
    """Draw a bar for each iteration, or for several in a row where there are many: the seconds
    computed outside of `step()`, those computed in it, and those waited. For a screen reader the
    table beside it says the same.
    """
    groups = _groups(iterations)
    most_s = max((one.whole_s for one in iterations), default=0.0)
    bars = [_step_bar(at, group, most_s) for at, group in enumerate(groups)]
    return _drawing(join(bars), max(1, len(groups)), 100, "steps")


def _groups(iterations: Sequence[IterationSummary]) -> list[Sequence[IterationSummary]]:
    each = max(1, -(-len(iterations) // _MOST_BARS))
    return [iterations[at : at + each] for at in range(0, len(iterations), each)]


def _step_bar(at: int, group: Sequence[IterationSummary], most_s: float) -> Html:
    whole_s = sum(one.whole_s for one in group) / len(group)
    waited_s = sum(one.waited_s for one in group) / len(group)
    step_s = sum(_computed_in_step_s(one) for one in group) / len(group)
    parts = {"forward": max(0.0, whole_s - waited_s - step_s), "update": step_s}
    rects, top = [], 100.0
    for kind, seconds in {**parts, "waiting": waited_s}.items():
        high = 100 * seconds / most_s if most_s else 0.0
        top -= high
        where = {"x": f"{at + 0.06:.2f}", "y": f"{top:.2f}"}
        rects.append(tag("rect", class_=f"fill-{kind}", width=0.88, height=f"{high:.2f}", **where))
    numbers = f"{group[0].number}" + (f" to {group[-1].number}" if len(group) > 1 else "")
    told = f"step {numbers}: {show_seconds(whole_s)}, waited {show_seconds(waited_s)}"
    return tag("g", tag("title", told), *rects)


def _computed_in_step_s(one: IterationSummary) -> float:
    waited_s = sum(s for cause, s in one.waits.items() if cause.startswith("step()"))
    return max(0.0, one.step_s - waited_s)
