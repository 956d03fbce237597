"""The whole page: one file with its style, its script and its data, which makes no request.

The Content-Security-Policy allows only the one script and the one style sheet whose hashes it
names, and forbids every request. The data is JSON in an element that is never run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from offload.core.errors import ConfigError
from offload.telemetry.run_file import Run
from offload.tools.html_report import comparison, sections
from offload.tools.html_report.by_unit import costs_of
from offload.tools.html_report.drawing import draw
from offload.tools.html_report.markup import Html, join, tag
from offload.tools.html_report.summary import summarize

_HERE: Final = Path(__file__).parent
_SCRIPTS: Final = ("numbers.js", "drawing.js", "page.js")  # one script, in this order
_LETTERS: Final = "AB"
_SECTIONS: Final = {
    "timeline-0": "Timeline",
    "parts": "Where the time goes",
    "memory": "Memory",
    "units": "Units",
    "steps": "Steps",
    "facts": "Plan",
    "fallbacks": "Fall-backs",
}
_SECTIONS_OF_TWO: Final = {
    "numbers": "Numbers",
    "timeline-0": "Timeline of A",
    "timeline-1": "Timeline of B",
    "parts": "Where the time goes",
    "units-0": "Units of A",
    "units-1": "Units of B",
    "facts-0": "Plan of A",
    "facts-1": "Plan of B",
}


def make_page(runs: Sequence[Run], paths: Sequence[str]) -> str:
    """Make the page of one run, or of two beside each other. paths: the names of the runs."""
    if len(runs) not in (1, 2) or len(paths) != len(runs):
        raise ConfigError(f"report: expected one run or two with a name each, got {len(runs)}")
    found = [summarize(run) for run in runs]
    title = " and ".join(dict.fromkeys(run.about.title for run in runs))
    is_one = len(runs) == 1
    body = _one(runs[0], paths[0]) if is_one else _two(runs, paths)
    data = [draw(run, one.tiers) for run, one in zip(runs, found, strict=True)]
    return _document(f"{title}: offload report", body, {"runs": data})


def _one(run: Run, path: str) -> Html:
    found, costs = summarize(run), costs_of(run)
    head = tag(
        "header",
        tag("p", f"offload report · {path}", class_="kicker"),
        tag("h1", run.about.title),
        sections.about_line(run.about),
        sections.verdict(run, found),
        sections.cards(found),
        sections.contents(_SECTIONS),
    )
    memory = sections.memory(found.tiers)
    second = sections.waits_by_unit(costs) if costs else memory
    rest = [
        sections.timeline(0, run),
        tag("div", sections.parts(found), second, class_="beside"),
        memory if costs else "",
        sections.units(costs),
        sections.steps(found),
        sections.facts(run.about),
        sections.fallbacks(run.about),
    ]
    return join([head, tag("main", *rest)])


def _two(runs: Sequence[Run], paths: Sequence[str]) -> Html:
    found, costs = [summarize(run) for run in runs], [costs_of(run) for run in runs]
    both = zip(_LETTERS, runs, found, costs, strict=True)
    head = tag(
        "header",
        tag("p", "offload report · two runs", class_="kicker"),
        tag("h1", " and ".join(f"{n}: {run.about.title}" for n, run, _, _ in both)),
        comparison.verdict(found[0], found[1]),
        sections.contents(_SECTIONS_OF_TWO),
    )
    first = [
        comparison.numbers(found[0], found[1]),
        comparison.who(runs[0].about, runs[1].about, paths),
    ]
    lines = [
        sections.timeline(number, run, f"Timeline of {_LETTERS[number]}: {path}")
        for number, (run, path) in enumerate(zip(runs, paths, strict=True))
    ]
    together = tag(
        "p",
        tag("label", tag("input", type="checkbox", id="together", checked=True), " Move both"),
        " at the same scale, from the start of an iteration on.",
        class_="hint needs-script",
        hidden=True,
    )
    beside = [comparison.parts(found[0], found[1]), comparison.waits_by_unit(costs[0], costs[1])]
    each: list[Html] = []
    for number, run in enumerate(runs):
        letter = _LETTERS[number]
        each += [
            sections.steps(found[number], f"-{number}", f"Steps of {letter}"),
            sections.units(costs[number], f"-{number}", f"Units of {letter}"),
            sections.facts(run.about, f"-{number}", f"Plan and budgets of {letter}"),
            sections.fallbacks(run.about, f"-{number}", f"Fall-backs of {letter}"),
        ]
    main = [tag("div", *first, class_="beside"), together, *lines, *beside, *each]
    return join([head, tag("main", *main)])


def _document(title: str, body: Html, data: Any) -> str:
    style = _HERE.joinpath("page.css").read_text("utf-8")
    script = "\n".join(_HERE.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),  # else a browser requests one
        tag("title", title),
        Html(f"<style>{style}</style>"),
    ]
    foot = tag("footer", tag("p", "Made by offload report. This file asks no server for anything."))
    kept = Html(f'<script type="application/json" id="data">{embedded(data)}</script>')
    inner = join([tag("a", "To the timeline", href="#timeline-0", class_="skip"), body, foot])
    page = tag("body", inner, kept, Html(f"<script>{script}</script>"))
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), page, lang='en')}\n"


def embedded(data: Any) -> str:
    """Encode data as JSON without <, > and &, so that it cannot end its HTML element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
