"""The search space, from a first trial with everything derived: which knobs are worth trying, and
the lower bound of an iteration's time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.core.config import ACTIVATIONS
from offload.core.errors import ConfigError
from offload.planning.profile import Tuning
from offload.planning.trial import TrialResult
from offload.tools.tune.search import Knob, SearchSpace

KI, MI = 1 << 10, 1 << 20
DEPTHS, COARSE_DEPTHS = tuple(range(9)), (0, 1, 2, 4, 8)
CHUNKS = (256 * KI, 512 * KI, MI, 2 * MI, 4 * MI)
QUEUES = (4, 8, 16, 32, 64)
UNITS = (1, 2, 4)  # layers in one unit
DERIVED_CHUNK, DERIVED_QUEUE = MI, 16  # the defaults of planner and store; a test compares them
# By the name on the command line, in the order in which they are turned.
FIELDS = {
    "depth": "prefetch_depth",
    "chunk": "chunk_numel",
    "queue": "queue_depth",
    "units": "unit_bytes",
    "threads": "threads",
}
_NUMBER = re.compile(r"(\d{1,12})(Ki|Mi)?")
_FEW = 4  # so many values are all tried at once


def parse_try(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse `depth=0,1,2` into the knob and its values; no values: the knob stays derived."""
    name, equals, values = text.partition("=")
    if not equals or name not in FIELDS:
        raise ConfigError(
            f"--try: expected KNOB=VALUE,VALUE,... with a knob of {', '.join(FIELDS)}, got {text!r}"
        )
    found = sorted({_parse_number(name, value) for value in values.split(",") if value})
    if found and found[0] < (0 if name == "depth" else 1):
        raise ConfigError(f"--try {name}: expected values from 1 on, got {found[0]}")
    return name, tuple(found)


def _parse_number(name: str, text: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--try {name}: expected whole numbers such as 4 or 512Ki, got {text!r}")
    return int(match[1]) * {None: 1, "Ki": KI, "Mi": MI}[match[2]]


def parse_activations(text: str | None) -> tuple[str, ...]:
    """Parse the activation policies to try; none: the loop's own policy stays."""
    if text is None:
        return ()
    names = ACTIVATIONS if text == "auto" else tuple(dict.fromkeys(text.split(",")))
    wrong = [name for name in names if name not in ACTIVATIONS]
    if wrong:
        raise ConfigError(
            f"--activations: expected auto, or some of {', '.join(ACTIVATIONS)}, got {wrong[0]!r}"
        )
    return names


def make_base(activations: Sequence[str]) -> Tuning:
    """Return the tuning of the first trial: all derived, but for the activation policy if "keep" is
    not among those to try.
    """
    return Tuning(activations=None if not activations or "keep" in activations else activations[0])


def make_space(
    first: TrialResult,
    base: Tuning,
    tries: Mapping[str, tuple[int, ...]],
    activations: Sequence[str],
    cores: int,
) -> tuple[SearchSpace, list[str]]:
    """Return what to try after the first trial, and a line for each knob that is not tried, with
    the reason.
    """
    if activations and not first.tunes_activations:
        raise ConfigError(
            '--activations: the loop does not leave them open; give activations="auto" to '
            "offload.prepare there"
        )
    if tries.get("depth") and not first.tunes_depth:
        raise ConfigError(
            '--try depth: the loop does not leave it open; give prefetch_depth="auto" to '
            "offload.prepare there, which is the default"
        )
    reasons = _reasons(first)
    knobs, notes = [], []
    for knob in _knobs(first, tries, cores):
        name = next(name for name, field in FIELDS.items() if field == knob.field)
        if name in tries or name not in reasons:
            knobs.append(knob)
        else:
            notes.append(f"{name} is not tried: {reasons[name]}")
    if len(activations) > 1:
        derived = base.activations or "keep"
        others = tuple(name for name in activations if name != derived)
        knobs.append(Knob("activations", others, others, derived=derived))
    return SearchSpace(base, tuple(knob for knob in knobs if knob.values)), notes


def _reasons(first: TrialResult) -> dict[str, str]:
    """Return the knobs that would change nothing, each with the reason."""
    moves = bool(first.disk_bytes or first.to_device_bytes)
    found: dict[str, str] = {}
    if not first.is_prepared:
        found |= dict.fromkeys(("depth", "units"), "the loop wraps an optimizer, no model")
    elif not moves:
        found |= dict.fromkeys(("depth", "units"), "no parameters move")
    elif not first.tunes_depth:
        found["depth"] = "the loop sets prefetch_depth itself"
    if not first.disk_bytes:
        found |= dict.fromkeys(("chunk", "queue"), "nothing is read from or written to disk")
    return found


def _knobs(first: TrialResult, tries: Mapping[str, tuple[int, ...]], cores: int) -> Iterable[Knob]:
    depths = tries.get("depth", DEPTHS)
    yield Knob("prefetch_depth", depths, COARSE_DEPTHS if depths == DEPTHS else coarse(depths))
    for name, usual, derived in (
        ("chunk", CHUNKS, DERIVED_CHUNK),
        ("queue", QUEUES, DERIVED_QUEUE),
    ):
        values = tries.get(name, usual)
        yield Knob(FIELDS[name], values, coarse(values), derived=derived)
    layer, most = first.layer_bytes or 0, max(1, first.layers)
    units = tuple(n * layer for n in tries.get("units", UNITS) if layer and n <= most)
    yield Knob("unit_bytes", units, units, derived=layer)
    threads = tries.get("threads", _powers(cores))
    yield Knob("threads", threads, coarse(threads), derived=first.threads)


def _powers(most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most`, and `most` itself."""
    return tuple(sorted({1 << n for n in range(most.bit_length()) if 1 << n <= most} | {most}))


def coarse(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return all values if they are few, else every other one and the last."""
    if len(values) <= _FEW:
        return tuple(values)
    return tuple(dict.fromkeys([*values[::2], values[-1]]))


@dataclass(frozen=True)
class Limit:
    """A lower bound of an iteration's seconds: what the drive needs for its bytes at the best rate
    of all trials, what the model computes, and the update. On the CPU the last two run one after
    the other on the same cores; on a device they could overlap.
    """

    disk_s: float
    compute_s: float
    update_s: float
    is_on_cpu: bool

    @classmethod
    def of(cls, best: Sequence[TrialResult], every: Sequence[TrialResult]) -> Limit:
        """Compute the bound. best: the trials of the best tuning. every: all that succeeded."""
        rate = max((r.disk_bytes_per_s or 0.0 for r in every), default=0.0)
        nbytes = min((result.disk_bytes for result in best), default=0)
        return cls(
            disk_s=nbytes / rate if rate else 0.0,
            compute_s=min((result.compute_s for result in every), default=0.0),
            update_s=min((result.update_s for result in every), default=0.0),
            is_on_cpu=all(target.device == "cpu" for r in every for target in r.targets),
        )

    @property
    def seconds(self) -> float:
        cores_s = self.compute_s + self.update_s
        return max(self.disk_s, cores_s if self.is_on_cpu else max(self.compute_s, self.update_s))

    def __str__(self) -> str:
        joined = "+" if self.is_on_cpu else "or"
        return (
            f"{self.seconds:.3g} s: drive {self.disk_s:.3g} s, or compute {self.compute_s:.3g} s "
            f"{joined} update {self.update_s:.3g} s"
        )
