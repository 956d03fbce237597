"""The text of a report: the key figures with their hints, a table of an iteration beside the whole
run, and notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import TextWrapper
from typing import Final

from offload.core.config import format_size
from offload.core.timeline import IN_MODEL, IN_STEP
from offload.telemetry.figures import key_figures
from offload.telemetry.iterations import IterationSummary
from offload.telemetry.parts import Account
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.words import MOVES, show_part, show_seconds, show_share

_SHOWN_S: Final = 0.0005  # of a cause; less is left out
_FACT: Final = TextWrapper(100, "  ", "  ", break_long_words=False, break_on_hyphens=False)
_WAY: Final = TextWrapper(100, "  -> ", "     ", break_long_words=False, break_on_hyphens=False)


def show_report(
    facts: RunFacts,
    total: Account,
    outside: Mapping[str, float],
    notes: Sequence[tuple[str, str]],
) -> str:
    """Return the text. outside: the seconds of waits outside of steps, by cause."""
    rows = [*_rows(facts.found, total, outside)]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    table = [
        f"{row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]:>{wide[3]}}"
        for row in rows
    ]
    below = [f"{name:<{wide[0]}}  {text}" for name, text in notes]
    return "\n".join([*_key_lines(facts, wide[0]), *map(str.rstrip, table), *below])


def _key_lines(facts: RunFacts, wide: int) -> Iterator[str]:
    """Yield the key figures as lines, each with its hints below it."""
    for figure in key_figures(facts):
        yield f"{figure.name:<{wide}}  {figure.text} ({figure.note})"
        for hint in figure.hints:
            yield _FACT.fill(hint.fact)
            yield from map(_WAY.fill, hint.ways)


def _rows(
    found: IterationSummary, total: Account, outside: Mapping[str, float]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the table: a name, seconds or bytes of an iteration, their share of it, and
    seconds or bytes in all.
    """
    yield "", "an iteration" if found.is_whole else "in step()", "", "in all"
    yield "steps", "", "", str(total.counts.get("steps", 0))
    yield from _seconds(found, total.seconds, outside)
    for name, text in MOVES.items():
        if total.moved[name] or name == "disk_written_bytes":
            one = format_size(round(found.moved.get(name, 0)))
            yield text, one, "", format_size(total.moved[name])


def _seconds(
    found: IterationSummary, in_steps: Mapping[str, float], outside: Mapping[str, float]
) -> Iterator[tuple[str, str, str, str]]:
    in_all = {IN_STEP + cause: s for cause, s in in_steps.items()}
    in_all |= {IN_MODEL + cause: s for cause, s in outside.items()}
    for part in dict.fromkeys([*found.parts, *in_all]):
        one_s, all_s = found.parts.get(part, 0.0), in_all.get(part)
        if max(one_s, all_s or 0.0) >= _SHOWN_S:
            share = show_share(one_s / found.typical_s) if found.typical_s else ""
            whole = "" if all_s is None else show_seconds(all_s)
            yield f"  {show_part(part)}", show_seconds(one_s), share, whole
