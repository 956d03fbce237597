"""The key figures of a run: the cards of the page and the first lines of the text report. Each is
computed here or in `iterations.py`, and has one name, text, note and hint wherever it is shown.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from offload.core.config import format_size
from offload.telemetry.hints import HITS, HOST, TIME, WAITING, Hint, hints_of
from offload.telemetry.iterations import IterationSummary
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.words import show_seconds, show_share, show_wait

# The memory that is told of: by tier, the number of the report, its name, and what it counts.
_MEMORY: Final = {
    "host": ("host_bytes", "host memory", "taken"),
    "device": ("device/peak_bytes", "device memory", "peak"),
    "process": ("process/peak_bytes", "RSS of the process", "peak"),
    "disk": ("disk_bytes", "disk", "in use at the end"),
}
_CEILING: Final = "share of the ceiling"


@dataclass(frozen=True)
class MemoryFigure:
    """The bytes of one tier, or of the whole process. budget_bytes: None: it has none."""

    name: str
    what: str
    nbytes: int
    budget_bytes: int | None

    def __str__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of {format_size(self.budget_bytes)}"
        return f"{format_size(self.nbytes)}{budget}"


@dataclass(frozen=True)
class KeyFigure:
    """A key figure as text. hints: what to change where it is bad."""

    name: str
    text: str
    note: str
    hints: tuple[Hint, ...] = ()


def memory_of(facts: RunFacts) -> dict[str, MemoryFigure]:
    """Return the memory by tier; what is not known is left out."""
    budgets = {"host": facts.about.host_bytes, "device": facts.about.device_bytes}
    return {
        tier: MemoryFigure(name, what, facts.number(number), budgets.get(tier))
        for tier, (number, name, what) in _MEMORY.items()
        if number in facts.numbers
    }


def key_figures(facts: RunFacts) -> list[KeyFigure]:
    """List the key figures: the time, the share of the ceiling, waits, host memory and hits. There
    are no seconds without a step, and no hits where no block was fetched.
    """
    hints = hints_of(facts)
    found = [*_seconds(facts.found), *_host_memory(facts), *_hits(facts.found)]
    return [
        KeyFigure(name, text, note, tuple(hints.get(about, ())))
        for about, name, text, note in found
    ]


def _seconds(found: IterationSummary) -> Iterator[tuple[str, str, str, str]]:
    """Yield what hints are about, then name, text and note of each figure; as those below."""
    if found.typical_s is None:
        return
    name, part, note = "time in step()", "step()", f"of {found.steps} steps"
    if found.is_whole:
        name, part = "time of an iteration", "an iteration"
        note = f"median of {found.steps - 1}, {' to '.join(map(show_seconds, found.span_s))}"
    if found.tokens_per_s is not None:
        note += f"; {found.tokens_per_s:,.0f} tokens/s"
    yield TIME, name, show_seconds(found.typical_s), note
    yield _CEILING, _CEILING, show_share(found.share_of_ceiling), ceiling_of(found)
    worst, waits = next(iter(found.stalls), None), f"of {part}"
    if worst is not None and found.stall_share:
        waited_s = show_seconds(found.stall_share * found.typical_s)
        waits = f"{waited_s} {waits}, most {show_wait(worst)}"
    yield WAITING, "waiting", show_share(found.stall_share), waits


def ceiling_of(found: IterationSummary) -> str:
    """Say what the ceiling is: an iteration takes at least what computing or the disk alone does,
    whichever is longer.
    """
    least = show_seconds(found.least_s)
    return f"at best {least}: {found.limit} alone, the longer of computing and disk"


def _host_memory(facts: RunFacts) -> Iterator[tuple[str, str, str, str]]:
    memory = memory_of(facts)
    host = memory.get("host")
    if host is not None:
        budget = "no budget" if host.budget_bytes is None else format_size(host.budget_bytes)
        peaks = (f"{one.name} {one}" for one in memory.values() if one.what == "peak")
        note = "; ".join([f"{host.what} of {budget}", *(f"peak {peak}" for peak in peaks)])
        yield HOST, host.name, format_size(host.nbytes), note


def _hits(found: IterationSummary) -> Iterator[tuple[str, str, str, str]]:
    rates = {"": found.hit_rate, "on the device ": found.device_hit_rate}
    known = [f"{place}{show_share(rate)}" for place, rate in rates.items() if rate is not None]
    if known:
        yield HITS, "prefetch hits", ", ".join(known), "blocks there or on their way when needed"
