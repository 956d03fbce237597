"""Hints: what to change where a figure of a run is bad, from the run's own facts. Page, text report
and `--json` show the same ones. Needs no torch.

A hint appears only where its remedy fits the facts: no more host memory where all fits, no further
drive where there is none, no other prefetch depth where it is derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from offload.core.config import format_size
from offload.telemetry.iterations import OUTSIDE
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.words import show_seconds, show_share

# The figures that hints are about.
TIME: Final = "time"
WAITING: Final = "waiting"
HOST: Final = "host memory"
HITS: Final = "prefetch hits"

# Of an iteration, for one kind of wait: below it a plan, too, calls the drives hidden.
LONG_WAIT: Final = 0.1
# Of the blocks to fetch: below it more than one in ten is read only when the model stands still.
LOW_HITS: Final = 0.9
# Of RSS beyond the engine's own account: what the C library's heap may keep, and a margin.
BEYOND_BYTES: Final = 300 << 20
DEEPEST: Final = 8  # units: a derived prefetch depth goes no further
MOST_TIMES: Final = 32  # the tokens; a factor beyond that is no advice
# One more byte for gradients or parameters needs so many of host memory: buffers for state take an
# eighth of it, and activations, where they are offloaded, as much.
_FOR_ONE_BYTE: Final = 8 / 7
_FOR_ONE_BYTE_OFFLOADING: Final = 8 / 6

_STATE: Final = ("disk read", "disk write")
_PARAMETERS: Final = ("parameter read", "parameter write")
_GRADIENTS: Final = ("gradient read", "gradient write")
_ACTIVATIONS: Final = ("activation read", "activation write")
_COPIES: Final = ("device copy",)
_LATE_GRADIENTS: Final = "gradients while backward runs"  # fall-backs, by name
_UNPINNED: Final = ("pinned host memory", "copies to and from ")


class Hint(NamedTuple):
    """What is bad about a figure, and ways to change that."""

    fact: str
    ways: tuple[str, ...] = ()


def hints_of(facts: RunFacts) -> dict[str, list[Hint]]:
    """Return the hints by the figure that they are about."""
    about_params = HITS if _is_low(facts) else WAITING
    found: dict[str, list[Hint]] = {name: [] for name in (TIME, WAITING, HOST, HITS)}
    found[TIME] += _fallbacks(facts)
    for waits in (_state, _gradients, _activations, _copies):
        found[WAITING] += waits(facts)
    found[about_params] += _parameters(facts)
    found[HOST] += _resident(facts)
    return found


def _fallbacks(facts: RunFacts) -> Iterator[Hint]:
    if facts.fallbacks:
        names, many = "; ".join(facts.fallbacks), len(facts.fallbacks)
        taken = "A fall-back was" if many == 1 else f"{many} fall-backs were"
        yield Hint(f"{taken} taken, for the reasons below: {names}.")


# --- what is bad ---------------------------------------------------------------------------------


def _is_long(facts: RunFacts, causes: Sequence[str]) -> bool:
    """Return whether these waits are worth a change. One step alone has no iteration."""
    whole_s = facts.found.typical_s or 0.0
    return facts.found.is_whole and 0 < LONG_WAIT * whole_s <= facts.waited_s(causes)


def _is_low(facts: RunFacts) -> bool:
    return facts.found.hit_rate is not None and facts.found.hit_rate < LOW_HITS


def _lacks_a_second_unit(facts: RunFacts) -> int:
    """Return the bytes of host memory that are missing for two of the largest units, the one in use
    and the next: without them nothing can be fetched ahead. Gradients come before parameters.
    """
    missing = 2 * facts.largest_unit - facts.number("model/memory_bytes")
    if not facts.params_away or missing <= 0:
        return 0
    is_offloading = facts.about.activations == "offload"
    each = _FOR_ONE_BYTE_OFFLOADING if is_offloading else _FOR_ONE_BYTE
    return math.ceil((missing + facts.gradients_away) * each)


# --- waits ----------------------------------------------------------------------------------------


def _state(facts: RunFacts) -> Iterator[Hint]:
    if _is_long(facts, _STATE) and facts.state_away:
        ways = [*_all_in_memory(facts), *_one_more_drive(facts)]
        times = _times_tokens(facts, _STATE)
        if times is not None:
            ways.append(
                f"{times} times the tokens an iteration, by gradient accumulation, bring these "
                f"waits below {show_share(LONG_WAIT)}"
            )
        what = f"optimizer state, of which {format_size(facts.state_away)} are on disk"
        yield from _advice(facts, _STATE, what, ways)


def _parameters(facts: RunFacts) -> Iterator[Hint]:
    ways = [*_second_unit(facts), *_derived_depth(facts)]
    if _is_long(facts, _PARAMETERS) and facts.params_away:
        ways += [*_all_in_memory(facts), *_one_more_drive(facts)]
    elif not _is_low(facts):
        return
    room, whole = (format_size(facts.number(f"model/{n}_bytes")) for n in ("memory", "param"))
    what = f"parameters: host memory has {room} for the {whole} of them"
    yield from _advice(facts, _PARAMETERS, what, ways)


def _gradients(facts: RunFacts) -> Iterator[Hint]:
    now, away = facts.about.host_bytes, facts.gradients_away
    if _is_long(facts, _GRADIENTS) and away and now is not None:
        moved = facts.moved("spilled", "spilled_read")
        way = (
            f"host_memory={_argument(now + away)} (now {format_size(now)}), of which gradients get "
            f"their part first, saves the {moved} that an iteration moves for them"
        )
        what = f"gradients, of which {format_size(away)} are on disk"
        yield from _advice(facts, _GRADIENTS, what, [way])


def _activations(facts: RunFacts) -> Iterator[Hint]:
    if _is_long(facts, _ACTIVATIONS) and facts.about.activations == "offload":
        what = f"activations, {facts.moved('activations_offloaded')} of them an iteration"
        way = 'offload.prepare(activations="recompute") runs layers again instead of moving them'
        yield from _advice(facts, _ACTIVATIONS, what, [way])


def _copies(facts: RunFacts) -> Iterator[Hint]:
    if not _is_long(facts, _COPIES):
        return
    ways, device, rate = [], facts.about.device_bytes, facts.found.device_hit_rate
    if _LATE_GRADIENTS in facts.fallbacks:
        ways.append("max_grad_norm=, instead of clipping in the loop, lets gradients come early")
    if any(name.startswith(_UNPINNED) for name in facts.fallbacks):
        ways.append("with pinned memory, which was refused, the CPU does not wait for each copy")
    if device is not None and rate is not None and rate < LOW_HITS:
        ways.append(
            f"more device_memory than {format_size(device)} keeps more blocks there: of those that "
            f"were needed {show_share(rate)} were there or on their way"
        )
    both = (facts.moved(way) for way in ("host_to_device", "device_to_host"))
    what = "copies, {} to the device and {} from it".format(*both)
    yield from _advice(facts, _COPIES, what, ways)


# --- memory ---------------------------------------------------------------------------------------


def _resident(facts: RunFacts) -> Iterator[Hint]:
    beyond, about = facts.number("process/beyond_books_bytes"), facts.about
    if beyond > BEYOND_BYTES:
        names = ("process/peak", "process/base", "process/engine")
        peak, base, engine = (format_size(facts.number(f"{name}_bytes")) for name in names)
        text = (
            f"The process had {peak} at the peak, {format_size(beyond)} more than the {base} "
            f"before and the {engine} that the engine has taken: activations, gradients in "
            "autograd's hands, your own data."
        )
        is_kept = about.device == "cpu" and about.activations == "keep"
        way = 'offload.prepare(activations="recompute") keeps fewer of the first'
        yield Hint(text, (way,) if is_kept and about.kind == "prepare" else ())


# --- what helps -----------------------------------------------------------------------------------


def _second_unit(facts: RunFacts) -> Iterator[str]:
    now, missing = facts.about.host_bytes, _lacks_a_second_unit(facts)
    if missing and now is not None:
        away = facts.gradients_away
        first = f"the {format_size(away)} of gradients on disk, which come first, and for "
        yield (
            f"host_memory={_argument(now + missing)} (now {format_size(now)}) has room for "
            f"{first if away else ''}the next unit beside the one in use, without which nothing is "
            "fetched ahead"
        )


def _derived_depth(facts: RunFacts) -> Iterator[str]:
    depth, room = facts.about.prefetch_depth, facts.number("model/memory_bytes")
    is_set = depth.isdecimal() and len(depth) < 3 and int(depth) < DEEPEST
    # For the unit in use, those ahead, and one more.
    if _is_low(facts) and is_set and (int(depth) + 2) * facts.largest_unit <= room:
        auto = 'offload.prepare(prefetch_depth="auto")'
        yield f"{auto} instead of {depth} fetches as far ahead as the drive needs"


def _all_in_memory(facts: RunFacts) -> Iterator[str]:
    now, away = facts.about.host_bytes, facts.state_away + facts.params_away + facts.gradients_away
    if now is not None and away:
        moved = facts.moved("disk_read", "disk_written")
        yield (
            f"host_memory={_argument(now + away)} (now {format_size(now)}) holds all and saves the "
            f"{moved} that the disk moves in an iteration, a smaller rise a part of them"
        )


def _one_more_drive(facts: RunFacts) -> Iterator[str]:
    count = facts.about.directories
    if count:
        yield f"a directory on one more drive in nvme=[...] (now {count}) takes its share of these"


def _times_tokens(facts: RunFacts, causes: Sequence[str]) -> int | None:
    """Return with how many times the computing outside of `step()` these waits, which stay as they
    are, would be short; None: with no number that is advice.
    """
    grows_s, whole_s = facts.found.parts.get(OUTSIDE, 0.0), facts.found.typical_s or 0.0
    if not grows_s:
        return None
    times = (facts.waited_s(causes) / LONG_WAIT - (whole_s - grows_s)) / grows_s
    return math.ceil(times) if 1 < times <= MOST_TIMES else None


def _advice(
    facts: RunFacts, causes: Sequence[str], what: str, ways: Sequence[str]
) -> Iterator[Hint]:
    """Yield the hint about some waits; none if nothing helps."""
    if ways:
        waited_s, whole_s = facts.waited_s(causes), facts.found.typical_s
        share = show_share(waited_s / whole_s if whole_s else None)
        text = f"{show_seconds(waited_s)} of an iteration ({share}) are waits for {what}."
        yield Hint(text, tuple(ways))


def _argument(nbytes: int) -> str:
    """Format a size as an argument in quotes, rounded up to three digits."""
    size, units = nbytes, ["B", "KiB", "MiB", "GiB", "TiB"]
    scale = 1
    while size >= 1000 * scale and len(units) > 1:
        scale, units = 1024 * scale, units[1:]
    digits = 0 if size >= 100 * scale or scale == 1 else 1 if size >= 10 * scale else 2
    shown = math.ceil(size / scale * 10**digits) / 10**digits
    return f'"{shown:g}{units[0]}"'
