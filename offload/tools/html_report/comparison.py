"""The sections that compare two runs, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.core.config import format_size
from offload.telemetry.run_file import About
from offload.tools.html_report.by_unit import UnitCost
from offload.tools.html_report.charts import bar
from offload.tools.html_report.markup import Html, tag
from offload.tools.html_report.sections import MOVES, SHOWN_SHARE, kind_of_part, section, table
from offload.tools.html_report.summary import Summary
from offload.tools.html_report.words import UNKNOWN, show_part, show_ratio, show_seconds, show_share

_MOST_UNITS = 40


def verdict(a: Summary, b: Summary) -> Html:
    """Say which run is faster, and by how much."""
    if not a.typical_s or not b.typical_s:
        return tag("p", "At least one of the runs has no steps to compare.", class_="verdict")
    times = [f"{show_seconds(a.typical_s)} in A", f"{show_seconds(b.typical_s)} in B"]
    waits = f"{show_share(a.stall_share)} of A and {show_share(b.stall_share)} of B is waiting"
    text = f"{', '.join(times)}: {_faster(a.typical_s, b.typical_s)}. {waits}."
    if a.is_whole != b.is_whole:
        text += " One of them has one step only: its time is that of step() alone."
    return tag("p", text, class_="verdict")


def _faster(a_s: float, b_s: float) -> str:
    ratio = max(a_s, b_s) / min(a_s, b_s)
    if ratio < 1.005:
        return "as fast as each other"
    return f"{'B' if b_s < a_s else 'A'} is {ratio:.3g} times as fast"


def who(a: About, b: About, paths: Sequence[str]) -> Html:
    """Show the facts of both runs, the rows that differ first."""
    both = {
        "file": tuple(paths),
        "model": (a.title, b.title),
        "date": (a.date, b.date),
        "machine": (f"{a.cpu}, {a.cores} cores", f"{b.cpu}, {b.cores} cores"),
        "computed on": (a.device, b.device),
        "made by": (a.made_by, b.made_by),
        "called": (f"offload.{a.kind}", f"offload.{b.kind}"),
        "host memory": (_budget(a.host_bytes), _budget(b.host_bytes)),
        "device memory": (_budget(a.device_bytes), _budget(b.device_bytes)),
        "directories": (str(a.directories), str(b.directories)),
        "prefetch depth": (a.prefetch_depth or UNKNOWN, b.prefetch_depth or UNKNOWN),
        "activations": (a.activations, b.activations),
        "tuned": (a.tuned or "no", b.tuned or "no"),
    }
    differs = [name for name, pair in both.items() if pair[0] != pair[1]]
    rows = [[name, *both[name]] for name in (*differs, *(n for n in both if n not in differs))]
    return section("The two runs", "who", table("The two runs", ["", "A", "B"], rows, 3))


def _budget(nbytes: int | None) -> str:
    return "no budget" if nbytes is None else format_size(nbytes)


def numbers(a: Summary, b: Summary) -> Html:
    rows: list[list[str]] = []

    def add(label: str, get: Callable[[Summary], float | None], show: Callable[..., str]) -> None:
        left, right = get(a), get(b)
        if left or right:
            shown = [UNKNOWN if value is None else show(value) for value in (left, right)]
            rows.append([label, *shown, show_ratio(left, right)])

    add("seconds an iteration, median", lambda s: s.typical_s, show_seconds)
    add("seconds in step(), median", lambda s: s.step_s, show_seconds)
    add("share of the ceiling", lambda s: s.share_of_ceiling, show_share)
    add("waiting", lambda s: s.stall_share, show_share)
    add("hit rate", lambda s: s.hit_rate, show_share)
    add("device hit rate", lambda s: s.device_hit_rate, show_share)
    for name, label in MOVES.items():
        add(label.lower(), lambda s, name=name: s.moved.get(name), _size)  # type: ignore[misc]
    for tier in dict.fromkeys(tier.name for tier in (*a.tiers, *b.tiers)):
        add(f"{tier}, peak", lambda s, tier=tier: _peak(s, tier), _size)  # type: ignore[misc]
    heads = ["", "A", "B", "B to A"]
    return section("Numbers", "numbers", table("Numbers of both runs", heads, rows))


def _size(nbytes: float) -> str:
    return format_size(round(nbytes))


def _peak(found: Summary, name: str) -> int | None:
    return next((tier.peak_bytes for tier in found.tiers if tier.name == name), None)


def parts(a: Summary, b: Summary) -> Html:
    """Show the parts of an iteration of each run: two bars for each part."""
    least_s = SHOWN_SHARE * min(sum(a.parts.values()), sum(b.parts.values()))
    most = {n: max(a.parts.get(n, 0.0), b.parts.get(n, 0.0)) for n in {**a.parts, **b.parts}}
    names = [name for name, seconds in most.items() if seconds and seconds >= least_s]
    most_s = max(most.values(), default=0.0)
    rows = []
    for name in names:
        left, right = a.parts.get(name, 0.0), b.parts.get(name, 0.0)
        rows.append([show_part(name), *_pair(left, right, most_s, kind_of_part(name))])
    heads = ["part", "A above B", "A", "B", "B to A"]
    title = "Where an iteration goes"
    return section(title, "parts", table(title, heads, rows, 2))


def waits_by_unit(a: Sequence[UnitCost], b: Sequence[UnitCost]) -> Html:
    """Show the waits of units, those of the same name beside each other."""
    both = [{cost.name: cost.seconds.get("waiting", 0.0) for cost in costs} for costs in (a, b)]
    most_s = max([*both[0].values(), *both[1].values()], default=0.0)
    waited = {n: both[0].get(n, 0.0) + both[1].get(n, 0.0) for n in {**both[0], **both[1]}}
    first = sorted((n for n, s in waited.items() if s), key=lambda n: -waited[n])[:_MOST_UNITS]
    if not first:
        text = "No wait of either timeline belongs to a unit."
        return section("Waits by unit", "unit-waits", tag("p", text))
    rows = [[n, *_pair(both[0].get(n, 0.0), both[1].get(n, 0.0), most_s, "waiting")] for n in first]
    heads = ["unit", "A above B", "A", "B", "B to A"]
    return section("Waits by unit", "unit-waits", table("Waits by unit", heads, rows, 2))


def _pair(a_s: float, b_s: float, most_s: float, kind: str) -> list[str]:
    bars = tag("span", bar(a_s, most_s, kind), bar(b_s, most_s, kind), class_="pair")
    return [bars, show_seconds(a_s), show_seconds(b_s), show_ratio(a_s, b_s)]
