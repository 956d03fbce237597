"""The sections of the page of one run, as HTML. All numbers and tables show without a script; only
the timeline needs one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offload.core.config import format_size
from offload.telemetry.run_file import About, Run
from offload.tools.html_report.by_unit import UnitCost, kind_of
from offload.tools.html_report.charts import bar, step_bars
from offload.tools.html_report.markup import Html, join, tag
from offload.tools.html_report.memory import MemoryBands
from offload.tools.html_report.summary import IterationSummary, Summary, hit_rate, is_wait
from offload.tools.html_report.words import (
    UNKNOWN,
    show_part,
    show_rate,
    show_seconds,
    show_share,
    show_wait,
)

_MOST_STEPS = 500  # rows of the table
SHOWN_SHARE = 0.001  # of an iteration; a smaller part is not shown
_HELP = (
    "Drag or use the arrow keys to move. Pinch, hold Ctrl and turn the wheel, or press + and - to "
    "zoom; a double click zooms in. Comma and full stop go from event to event. Shaded: step()."
)
_LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("evaluation", "evaluation"),
    ("update", "update"),
    ("waiting", "waiting"),
    ("to-device", "copy to the device"),
    ("to-host", "copy to the host"),
    ("read", "disk read"),
    ("write", "disk write"),
)


def section(title: str, name: str, *children: str) -> Html:
    head = tag("h2", title, id=f"{name}-title")
    return tag("section", head, *children, id=name, aria_labelledby=f"{name}-title")


def table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Html:
    """Make a table in a box that scrolls sideways. words: how many columns from the left are no
    numbers; the first column is the head of its row.
    """
    top = [tag("th", text, scope="col", class_=_align(n, words)) for n, text in enumerate(heads)]
    lines = []
    for row in rows:
        cells = [tag("td", text, class_=_align(n, words)) for n, text in enumerate(row[1:], 1)]
        lines.append(tag("tr", tag("th", row[0], scope="row"), *cells))
    inner = tag("table", tag("thead", tag("tr", *top)), tag("tbody", *lines))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)


def _align(column: int, words: int) -> str | None:
    return None if column < words else "number"


# --- head -----------------------------------------------------------------------------------------


def verdict(run: Run, found: Summary) -> Html:
    """Sum up the run in one sentence."""
    if found.typical_s is None:
        return tag("p", "No step was recorded: there is nothing to tell yet.", class_="verdict")
    what = "An iteration" if found.is_whole else "step()"
    text = f"{what} takes {show_seconds(found.typical_s)}"
    if found.stall_share and found.stalls:
        worst = show_wait(next(iter(found.stalls)))
        text += f"; {show_share(found.stall_share)} of it is waiting, most of that {worst}."
    else:
        text += " and waits for nothing."
    if found.share_of_ceiling is not None:
        text += (
            f" That is {show_share(found.share_of_ceiling)} of the speed that {found.limit} alone"
            f" would allow here ({show_seconds(found.least_s)})."
        )
    if run.about.fallbacks:
        text += f" Fall-backs: {len(run.about.fallbacks)}, listed below."
    return tag("p", text, class_="verdict")


def about_line(about: About) -> Html:
    machine = f"{about.cpu}, {about.cores} cores, computed on {about.device}"
    budgets = [f"host memory {_budget(about.host_bytes)}"]
    if about.device_bytes is not None:
        budgets.insert(0, f"device memory {_budget(about.device_bytes)}")
    where = f"{about.directories} on disk" if about.directories else "none on disk"
    called = f"offload.{about.kind}: {', '.join(budgets)}, directories: {where}"
    return join(
        [
            tag("p", f"{about.date} · {machine} · {about.made_by}", class_="about"),
            tag("p", called, class_="about"),
        ]
    )


def _budget(nbytes: int | None) -> str:
    return "no budget given" if nbytes is None else format_size(nbytes)


def contents(names: Mapping[str, str]) -> Html:
    """Make the links to the sections. names: their titles, by id."""
    links = [tag("a", title, href=f"#{name}") for name, title in names.items()]
    return tag("nav", *links, aria_label="Sections")


def cards(found: Summary) -> Html:
    """Show the key numbers as cards."""
    shown = [_card(*one) for one in key_numbers(found)]
    return tag("dl", *shown, class_="cards")


def _card(label: str, value: str, note: str) -> Html:
    inner = tag("dd", value, class_="value") + tag("dd", note, class_="note")
    return tag("div", tag("dt", label), Html(inner))


def key_numbers(found: Summary) -> list[tuple[str, str, str]]:
    """List the key numbers: label, value and note of each."""
    part = "an iteration" if found.is_whole else "a step()"
    spread = [one.whole_s for one in found.iterations if one.total_s is not None]
    note = f"of {len(found.iterations)} steps"
    if spread:
        ends = f"{show_seconds(min(spread))} to {show_seconds(max(spread))}"
        note = f"median of {len(spread)}, {ends}"
    numbers = [
        (f"Seconds {part}", show_seconds(found.typical_s), note),
        (
            "Share of the ceiling",
            show_share(found.share_of_ceiling),
            f"limit: {found.limit}, {show_seconds(found.least_s)}" if found.limit else "",
        ),
        ("Waiting", show_share(found.stall_share), f"of {part}"),
    ]
    if found.hit_rate is not None:
        numbers.append(("Hit rate", show_share(found.hit_rate), "blocks there when needed"))
    if found.device_hit_rate is not None:
        numbers.append(("Device hit rate", show_share(found.device_hit_rate), "there when needed"))
    for name, label in MOVES.items():
        if found.moved.get(name) or name.startswith("disk"):
            value = found.moved.get(name, 0.0)
            numbers.append((label, format_size(round(value)), f"{part}{_rate_note(found, value)}"))
    return numbers + [_tier_card(tier) for tier in found.tiers]


MOVES = {
    "disk_read_bytes": "Read from disk",
    "disk_written_bytes": "Written to disk",
    "spilled_bytes": "Gradients to disk",
    "host_to_device_bytes": "Copied to the device",
    "device_to_host_bytes": "Copied to the host",
}


def _rate_note(found: Summary, nbytes: float) -> str:
    return f", {show_rate(nbytes / found.typical_s)}" if nbytes and found.typical_s else ""


def _tier_card(tier: MemoryBands) -> tuple[str, str, str]:
    label = f"{tier.name[:1].upper()}{tier.name[1:]}, peak"
    if tier.budget_bytes is None:
        return label, format_size(tier.peak_bytes), "no budget"
    share = show_share(tier.peak_bytes / tier.budget_bytes) if tier.budget_bytes else UNKNOWN
    return label, format_size(tier.peak_bytes), f"{share} of {format_size(tier.budget_bytes)}"


# --- timeline -------------------------------------------------------------------------------------


def timeline(number: int, run: Run, title: str = "Timeline") -> Html:
    """Make the timeline's canvas, toolbar and legend. number: the run's number on the page, by
    which the script finds the canvas.
    """
    there = {kind_of(event) for event in run.events}
    legend = [
        tag("li", tag("span", class_=f"swatch back-{kind}"), text)
        for kind, text in _LEGEND
        if kind in there
    ]
    canvas = tag(
        "canvas",
        f"Timeline of {len(run.events)} events; the tables below say the same in numbers.",
        tabindex=0,
        role="application",
        aria_label="Timeline. Arrow keys move, plus and minus zoom, 0 shows all, "
        "comma and full stop go from event to event.",
        data_run=number,
    )
    detail = tag("output", "Point at, tap or select an event.", class_="detail", aria_live="polite")
    without = tag("noscript", tag("p", "The timeline needs JavaScript; the numbers below do not."))
    return section(
        title,
        f"timeline-{number}",
        without,
        tag("div", _toolbar(number, run), canvas, detail, class_="timeline", hidden=True),
        tag("ul", *legend, class_="legend"),
        tag("p", _HELP, class_="hint needs-script", hidden=True),
    )


def _toolbar(number: int, run: Run) -> Html:
    buttons = [
        ("in", "+", "Zoom in"),
        ("out", "\u2212", "Zoom out"),
        ("earlier", "\u2190", "Earlier"),
        ("later", "\u2192", "Later"),
        ("previous", "Previous", "Previous iteration"),
        ("next", "Next", "Next iteration"),
        ("all", "All", "Show all"),
    ]
    shown = [
        tag("button", text, type="button", data_do=do, aria_label=label, title=label)
        for do, text, label in buttons
    ]
    if run.about.units:
        words = "Rows by unit"
        shown.append(
            tag(
                "button", words, type="button", data_do="units", aria_pressed="false", class_="wide"
            )
        )
    return tag("div", *shown, class_="toolbar", role="group", aria_label=f"Timeline {number + 1}")


# --- tables ---------------------------------------------------------------------------------------


def parts(found: Summary) -> Html:
    """Show the parts of an iteration, in seconds and shares."""
    total_s = sum(found.parts.values())
    most_s = max(found.parts.values(), default=0.0)
    rows = [
        [show_part(part), bar(s, most_s, kind_of_part(part)), show_seconds(s), _part(s, total_s)]
        for part, s in found.parts.items()
        if s >= total_s * SHOWN_SHARE and s
    ]
    what = "an iteration" if found.is_whole else "step()"
    note = f"Means of {what}, {show_seconds(total_s)} in all; parts below 0.1 % are not shown."
    if found.left_out:
        note += f" Left out: {found.left_out} that took more than three times the median."
    heads = ["part", "", "seconds", "share"]
    title = f"Where {what} goes"
    return section(title, "parts", table(title, heads, rows, 2), tag("p", note, class_="hint"))


def kind_of_part(part: str) -> str:
    if is_wait(part):
        return "waiting"
    return "update" if part.startswith("step()") else "forward"


def _part(value: float, whole: float) -> str:
    return show_share(value / whole if whole else None)


def waits_by_unit(costs: Sequence[UnitCost], name: str = "") -> Html:
    waited = sorted(costs, key=lambda cost: -cost.seconds.get("waiting", 0.0))
    waited = [cost for cost in waited if cost.seconds.get("waiting")][:20]
    if not waited:
        text = "No wait of the timeline belongs to a unit."
        return section("Waits by unit", f"unit-waits{name}", tag("p", text))
    most_s = waited[0].seconds["waiting"]
    rows = [
        [c.name, bar(c.seconds["waiting"], most_s, "waiting"), show_seconds(c.seconds["waiting"])]
        for c in waited
    ]
    return section(
        "Waits by unit",
        f"unit-waits{name}",
        table("Waits by unit", ["unit", "", "an iteration"], rows, 2),
        tag("p", "Of the iterations in the timeline; in step() and outside.", class_="hint"),
    )


def memory(tiers: Sequence[MemoryBands]) -> Html:
    rows = []
    for tier in tiers:
        budget = tier.budget_bytes
        most = max(tier.peak_bytes, budget or 0)
        rows.append([tier.name, *_memory_row(tier.peak_bytes, budget, most)])
        if len(tier.bands) > 1:
            for band in tier.bands:
                rows.append([f"  {band.label}", *_memory_row(max(band.nbytes), None, most)])
    if not rows:
        return section("Memory", "memory", tag("p", "No memory was sampled in this run."))
    heads = ["tier", "", "peak", "budget", "share"]
    return section("Memory", "memory", table("Memory", heads, rows, 2))


def _memory_row(peak: int, budget: int | None, most: int) -> list[str]:
    shown = "" if budget is None else format_size(budget)
    share = "" if not budget else show_share(peak / budget)
    return [bar(peak, most, "memory"), format_size(peak), shown, share]


def units(costs: Sequence[UnitCost], name: str = "", title: str = "Units") -> Html:
    if not costs:
        text = "The model was not prepared: only its optimizer state is tiered."
        return section(title, f"units{name}", tag("p", text))
    heads = ["unit", "size", "forward", "backward", "update", "waited", "reads", "read", "written"]
    rows = [_unit_row(cost) for cost in costs]
    hint = "An iteration of the timeline. Reads and writes are those of parameters and of state."
    return section(title, f"units{name}", table(title, heads, rows), tag("p", hint, class_="hint"))


def _unit_row(cost: UnitCost) -> list[str]:
    kinds = ("forward", "backward", "update", "waiting")
    seconds = [show_seconds(cost.seconds.get(kind, 0.0)) for kind in kinds]
    moved = [format_size(round(cost.moved.get(kind, 0.0))) for kind in ("read", "write")]
    return [
        cost.name,
        format_size(cost.nbytes),
        *seconds,
        f"{cost.acts.get('read', 0):.3g}",
        *moved,
    ]


def steps(found: Summary, name: str = "", title: str = "Steps") -> Html:
    iterations = found.iterations
    if not iterations:
        return section(title, f"steps{name}", tag("p", "No step was recorded."))
    heads = ["step", "seconds", "in step()", "waited", "read", "written", "hits"]
    last = iterations[-_MOST_STEPS:]
    most_s = max(one.whole_s for one in iterations)
    key = [("forward", "outside step()"), ("update", "in step()"), ("waiting", "waiting")]
    legend = [tag("li", tag("span", class_=f"swatch back-{k}"), text) for k, text in key]
    is_all = len(last) == len(iterations)
    which = f"all {len(last)}" if is_all else f"the last {len(last)} of {len(iterations)}"
    summary = f"Table of {which} steps"
    return section(
        title,
        f"steps{name}",
        tag("p", f"Seconds, from 0 to {show_seconds(most_s)}", class_="hint"),
        step_bars(iterations),
        tag("ul", *legend, class_="legend"),
        tag("details", tag("summary", summary), table(title, heads, map(_step_row, last))),
    )


def _step_row(one: IterationSummary) -> list[str]:
    whole = UNKNOWN if one.total_s is None else show_seconds(one.total_s)
    seconds = [whole, show_seconds(one.step_s), show_seconds(one.waited_s)]
    names = ("disk_read_bytes", "disk_written_bytes")
    moved = [format_size(one.counts.get(name, 0)) for name in names]
    return [str(one.number), *seconds, *moved, show_share(hit_rate(one.counts, "parameter"))]


# --- the run's facts ------------------------------------------------------------------------------


def facts(about: About, name: str = "", title: str = "Plan and budgets") -> Html:
    size = format_size
    known = {
        "called": f"offload.{about.kind}",
        "host memory": _budget(about.host_bytes),
        "device memory": None if about.device_bytes is None else _budget(about.device_bytes),
        "directories on disk": str(about.directories),
        "prefetch depth": about.prefetch_depth or None,
        "activations": about.activations,
        "tuned": about.tuned or "no",
        "chunk": None if about.chunk_numel is None else f"{about.chunk_numel:,} elements",
        "parameters trained": f"{sum(param.numel for param in about.params):,}",
    }
    shares = {f"host memory, {what}": size(n) for what, n in about.shares.items() if n}
    rows = [[label, text] for label, text in {**known, **shares}.items() if text is not None]
    plan = tag("pre", about.plan, tabindex=0, role="region", aria_label="Plan")
    shown = table(title, ["what", "value"], rows, 2)
    return section(title, f"facts{name}", shown, plan if about.plan else "")


def fallbacks(about: About, name: str = "", title: str = "Fall-backs") -> Html:
    if not about.fallbacks:
        text = "None: everything ran in the way it should."
        return section(title, f"fallbacks{name}", tag("p", text))
    lines = [tag("li", tag("strong", what), ": ", why) for what, why in about.fallbacks.items()]
    return section(title, f"fallbacks{name}", tag("ul", join(lines), class_="fallbacks"))
