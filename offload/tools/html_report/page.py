"""The whole page: one file with its style, its script and its data, which makes no request.

What it shows is in the templates beside this module, which escape every text: names in a run file
are untrusted. All numbers and tables show without a script; only the timeline needs one. The
Content-Security-Policy allows only the one script and the one style sheet whose hashes it names,
and forbids every request. The data is JSON in an element that is never run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from offload.core.config import format_size
from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.telemetry.figures import ceiling_of, key_figures, memory_of
from offload.telemetry.iterations import Iteration, IterationSummary, hit_rate, iterations_of
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.run_file import Run
from offload.telemetry.words import (
    MOVES,
    UNKNOWN,
    show_part,
    show_rate,
    show_ratio,
    show_seconds,
    show_share,
    show_wait,
)
from offload.tools.html_report.timeline import (
    costs_of,
    draw,
    kind_of,
    kind_of_part,
    tiers_of,
)

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE: Final = Path(__file__).parent
_SCRIPTS: Final = ("numbers.js", "drawing.js", "page.js")  # one script, in this order
_SHOWN_SHARE: Final = 0.001  # of an iteration; a smaller part is not shown
_MOST_UNITS: Final = 20  # with their waits
_MOST_BARS: Final = 200  # of steps


def make_page(runs: Sequence[Run], paths: Sequence[str]) -> str:
    """Make the page of one run, or of two beside each other. paths: the names of the runs."""
    if len(runs) not in (1, 2) or len(paths) != len(runs):
        raise ConfigError(f"report: expected one run or two with a name each, got {len(runs)}")
    shown = [_shown(run, path) for run, path in zip(runs, paths, strict=True)]
    style = _HERE.joinpath("page.css").read_text("utf-8")
    script = "\n".join(_HERE.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    template = environment().get_template("one.html" if len(runs) == 1 else "two.html")
    return template.render(
        runs=shown,
        title=" and ".join(dict.fromkeys(run.about.title for run in runs)),
        style=style,
        script=script,
        hashes={"style": _hash(style), "script": _hash(script)},
        data={"runs": [draw(run, one["tiers"]) for run, one in zip(runs, shown, strict=True)]},
        parts=_parts([one["found"] for one in shown]),
        waits=_waits([one["costs"] for one in shown]),
        compared=[*_compared(*shown)] if len(shown) == 2 else [],
        moves=MOVES,
    )


def environment() -> Environment:
    """Make the templates' environment. What cannot be seen in a text is spelled out, a name that is
    not known is an error.
    """
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        finalize=_spelled_out,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters |= {
        "part": show_part,
        "rate": show_rate,
        "ratio": show_ratio,
        "seconds": show_seconds,
        "share": show_share,
        "size": _size,
        "wait": show_wait,
    }
    made.globals |= {"UNKNOWN": UNKNOWN, "hit_rate": hit_rate, "ceiling_of": ceiling_of}
    return made


def _spelled_out(value: Any) -> Any:
    """Spell out controls, marks that turn the direction of writing, and lone surrogates. Markup is
    left as it is: it was made from texts that went through here.
    """
    if type(value) is not str or value.isprintable():
        return value
    return "\n".join(map(printable, value.split("\n")))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _shown(run: Run, path: str) -> dict[str, Any]:
    """Return all that the templates show of one run."""
    iterations, facts = [*iterations_of(run.about.steps)], RunFacts.of(run)
    return {
        "path": path,
        "about": run.about,
        "found": facts.found,
        "figures": key_figures(facts),
        "memory": memory_of(facts),
        "iterations": iterations,
        "longest_s": max((one.whole_s for one in iterations), default=0.0),
        "bars": [*_bars(iterations)],
        "costs": costs_of(run),
        "tiers": tiers_of(run),
        "kinds": {kind_of(event) for event in run.events},
        "events": len(run.events),
        "facts": _facts(run, path),
    }


def _facts(run: Run, path: str) -> dict[str, str]:
    about = run.about
    chunk = UNKNOWN if about.chunk_numel is None else f"{about.chunk_numel:,} elements"
    shares = {f"host memory, {what}": n for what, n in about.shares.items() if n}
    return {
        "file": path,
        "model": about.title,
        "date": about.date,
        "machine": f"{about.cpu}, {about.cores} cores",
        "computed on": about.device,
        "made by": about.made_by,
        "called": f"offload.{about.kind}",
        "host memory": _budget(about.host_bytes),
        "device memory": _budget(about.device_bytes),
        "directories on disk": str(about.directories),
        "prefetch depth": about.prefetch_depth or UNKNOWN,
        "activations": about.activations,
        "tuned": about.tuned or "no",
        "chunk": chunk,
        "parameters trained": f"{sum(param.numel for param in about.params):,}",
        **{name: format_size(nbytes) for name, nbytes in shares.items()},
    }


def _size(nbytes: float) -> str:
    return format_size(round(nbytes))


def _budget(nbytes: int | None) -> str:
    return "no budget" if nbytes is None else format_size(nbytes)


# --- rows -----------------------------------------------------------------------------------------


class _BarRow(NamedTuple):
    """A row of a table with a bar for each run. kind: the colour."""

    name: str
    kind: str
    seconds: Sequence[float]


def _parts(found: Sequence[IterationSummary]) -> list[_BarRow]:
    """Return the parts of an iteration of each run, without those that are small in all."""
    least_s = _SHOWN_SHARE * min(sum(one.parts.values()) for one in found)
    rows = [
        _BarRow(show_part(name), kind_of_part(name), [one.parts.get(name, 0.0) for one in found])
        for name in dict.fromkeys(name for one in found for name in one.parts)
    ]
    return [row for row in rows if max(row.seconds) > 0 and max(row.seconds) >= least_s]


def _waits(costs: Sequence[Sequence[Any]]) -> list[_BarRow]:
    """Return the waits of units, those of the same name beside each other, the longest first."""
    waited = [{cost.name: cost.seconds["waiting"] for cost in each} for each in costs]
    names = dict.fromkeys(name for each in waited for name in each)
    rows = [_BarRow(name, "waiting", [each.get(name, 0.0) for each in waited]) for name in names]
    longest = sorted((row for row in rows if any(row.seconds)), key=lambda row: -sum(row.seconds))
    return longest[:_MOST_UNITS]


def _bars(iterations: Sequence[Iteration]) -> Iterator[dict[str, Any]]:
    """Yield a bar for each iteration, or for several in a row where there are many: the seconds
    computed outside of `step()`, those computed in it, and those waited. For a screen reader the
    table below says the same.
    """
    each = max(1, -(-len(iterations) // _MOST_BARS))
    for group in (iterations[at : at + each] for at in range(0, len(iterations), each)):
        whole_s, waited_s, step_s = (
            sum(values) / len(group)
            for values in zip(
                *((one.whole_s, one.waited_s, one.computed_in_step_s) for one in group),
                strict=True,
            )
        )
        numbers = f"{group[0].number}" + (f" to {group[-1].number}" if len(group) > 1 else "")
        yield {
            "title": f"step {numbers}: {show_seconds(whole_s)}, waited {show_seconds(waited_s)}",
            "parts": {
                "forward": max(0.0, whole_s - waited_s - step_s),
                "update": step_s,
                "waiting": waited_s,
            },
        }


def _compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the numbers of two runs as text: name, A, B, B to A."""
    found: Sequence[IterationSummary] = (a["found"], b["found"])
    rows: list[tuple[str, list[float | None], Callable[..., str]]] = [
        ("time of an iteration, median", [one.typical_s for one in found], show_seconds),
        ("time in step(), median", [one.step_s for one in found], show_seconds),
        ("tokens/s", [one.tokens_per_s for one in found], "{:,.0f}".format),
        ("share of the ceiling", [one.share_of_ceiling for one in found], show_share),
        ("waiting", [one.stall_share for one in found], show_share),
        ("prefetch hits", [one.hit_rate for one in found], show_share),
        ("prefetch hits on the device", [one.device_hit_rate for one in found], show_share),
    ]
    rows += [(text, [one.moved.get(name) for one in found], _size) for name, text in MOVES.items()]
    for tier, one in {**a["memory"], **b["memory"]}.items():
        both = [each["memory"][tier].nbytes if tier in each["memory"] else None for each in (a, b)]
        rows.append((f"{one.name}, {one.what}", both, _size))
    for name, (left, right), show in rows:
        if left or right:
            shown = [UNKNOWN if value is None else show(value) for value in (left, right)]
            yield name, shown[0], shown[1], show_ratio(left, right)
