"""The forecast of a training: the request, checked before anything is done, and the answer, a table
for people and numbers for scripts. `forecaster` computes it. Needs no torch.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.core.config import ACTIVATIONS, PARAM_DTYPES, format_size, parse_name, parse_size
from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.tools.forecast.model_shape import NO_SHAPE, Shape
from offload.tools.output import table

if TYPE_CHECKING:  # it imports torch, which the checks do not need
    from offload.planning.planner import Budgets

FORMAT = "offload forecast"
VERSION = 1
_SMALL_SHARE = 0.005  # of a step: parts that are smaller are not shown
HIDDEN_SHARE = 0.1  # of a step: drives that it waits for no longer than this are hidden
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60
OPTIMIZERS = ("adamw", "adam", "sgd", "lion")
_SHAPE = tuple(field.name for field in fields(Shape) if field.name != "key_value_heads")


@dataclass(frozen=True)
class ForecastRequest:
    """A request for the forecast of a training.

    host_bytes, device_bytes: budgets; None: the machine's usual ones. drives: how many; None: those
    that the machine has. dtype: None: the model's own. save_every: steps between checkpoints; None:
    never. endurance_tb: terabytes written that one drive is rated for. on: a profile's file, or the
    name of a shipped one; None: this machine's own.
    """

    model: str
    shape: Shape = NO_SHAPE
    batch: int = 1
    sequence: int = 1024
    steps: int = 10_000
    save_every: int | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    drives: int | None = None
    activations: str = "keep"
    on: str | None = None
    endurance_tb: float | None = None

    @classmethod
    def of(cls, model: str | os.PathLike[str], **given: Any) -> ForecastRequest:
        """Make a request from keywords as `offload.plan` takes them; None counts as not given.
        Raises `ConfigError` for a value that is wrong and for a name that is unknown.
        """
        for name in given:
            if name not in FIELDS:
                near = difflib.get_close_matches(name, FIELDS, n=1)
                raise ConfigError(
                    f"{name}: no such field of a plan for a model that is named"
                    + (f"; did you mean {near[0]}?" if near else "")
                    + f"; fields: {', '.join(FIELDS)}"
                )
        known = {name: value for name, value in given.items() if value is not None}
        if "nvme" in known and "nvme_count" in known:
            raise ConfigError("nvme_count: give it or nvme, not both")
        made: dict[str, Any] = {
            field: parse(name, known[name])
            for name, (field, parse) in _PARSERS.items()
            if name in known
        }
        made["shape"] = Shape(**{name: known[name] for name in _SHAPE if name in known})
        return cls(model=os.fspath(model), **made)

    def within(self, usual: Budgets) -> Budgets:
        """Return the budgets; one that is not given is the usual one."""
        given: dict[str, Any] = {
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "directories": self.drives,
        }
        return replace(usual, **{name: n for name, n in given.items() if n is not None})


def _whole(name: str, value: object, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: expected a whole number, {least} or more, got {value!r}")
    return value


def _terabytes(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"{name}: expected terabytes above 0, such as 600, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _count_directories(name: str, value: Any) -> int:
    """Return the number of drives that are given by their directories, which must exist."""
    paths = [Path(path) for path in ([value] if isinstance(value, str | os.PathLike) else value)]
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"{name}: {printable(path)} is not a directory; make it, or give another"
            )
    return len(paths)


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    return lambda name, value: parse_name(name, value, allowed)


# By keyword: the field of the request, and what makes it of a keyword and its value.
_PARSERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "batch": ("batch", _whole),
    "sequence": ("sequence", _whole),
    "steps": ("steps", _whole),
    "save_every": ("save_every", _whole),
    "optimizer": ("optimizer", _one_of(*OPTIMIZERS)),
    "dtype": ("dtype", _one_of(*PARAM_DTYPES)),
    "host_memory": ("host_bytes", parse_size),
    "device_memory": ("device_bytes", parse_size),
    "nvme": ("drives", _count_directories),
    "nvme_count": ("drives", lambda name, value: _whole(name, value, 0)),
    "activations": ("activations", _one_of(*ACTIVATIONS)),
    "on": ("on", lambda name, value: os.fspath(value)),
    "endurance": ("endurance_tb", _terabytes),
}
FIELDS = (*_SHAPE, *_PARSERS)


# --- the answer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """The seconds of one steady step.

    other_s: neither computed, updated nor waited. stalls: seconds waited, by where and why. limit:
    the resource that would take longest if all worked at once without waiting; it would take
    limit_s. depth: the prefetch depth.
    """

    step_s: float
    compute_s: float
    update_s: float
    other_s: float
    stalls: dict[str, float]
    limit: str
    limit_s: float
    depth: int

    def large_parts(self, told: Callable[[float], str], **more: float) -> str:
        """Tell those parts of the step that are not too small to matter."""
        parts = {"compute": self.compute_s, "update": self.update_s, **self.stalls, **more}
        large = [f"{n} {told(s)}" for n, s in parts.items() if s >= _SMALL_SHARE * self.step_s]
        return ", ".join(large)


@dataclass(frozen=True)
class Timing(StepTime):
    """The time of a training.

    hidden_tokens: the tokens of a step from which on less than a tenth of it is spent waiting for
    the drives; None: no number suffices. gains: the seconds by which one more of a resource
    shortens a step.
    """

    tokens_per_s: float
    training_s: float
    hidden_tokens: int | None
    gains: dict[str, float]


@dataclass(frozen=True)
class CheckpointCost:
    """The cost of a training's checkpoints. each_bytes, each_s: of one checkpoint; each_s is None
    if speeds are not known.
    """

    count: int
    each_bytes: int
    each_s: float | None


@dataclass(frozen=True)
class Wear:
    """The wear of the drives by all that a training writes. share: of what all drives together are
    rated for; None: no rating was given.
    """

    written_tb: float
    endurance_tb: float | None
    share: float | None


@dataclass(frozen=True)
class Forecast:
    """A forecast of one training on one machine. `str()` is a table.

    host_bytes, device_bytes: budgets; None: no limit, or no device. tiers: bytes of each kind on
    each tier. read_bytes, written_bytes: by the drives in a step, as a report counts them; both
    include spilled_bytes of gradients. taken_bytes: host memory that the engine takes.
    passing_bytes: what activations and logits take where the model runs. least: the smallest
    budgets that work. plain_bytes: what torch alone would need in one place.
    """

    model: str
    machine: str
    machine_note: str
    numel: int
    trained_numel: int
    dtype: str
    units: int
    batch: int
    sequence: int
    tokens: int
    steps: int
    optimizer: str
    activations: str
    flops: float
    host_bytes: int | None
    device_bytes: int | None
    drives: int
    tiers: dict[str, dict[str, int]]
    taken_bytes: int
    passing_bytes: int
    disk_room_bytes: int
    read_bytes: int
    written_bytes: int
    spilled_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    wear: Wear
    saving: CheckpointCost
    least: dict[str, int]
    plain_bytes: int
    fits_without_us: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    tuned: str | None = None
    timing: Timing | None = None  # None: speeds are not known

    @property
    def works(self) -> bool:
        """Whether the forecast has found no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def __str__(self) -> str:
        rows = [*self._about(), *self._bytes(), *self._times(), *self._advice()]
        return "\n".join(line.rstrip() for line in table(rows, width=None))

    def _about(self) -> Iterator[tuple[str, str]]:
        yield "model", f"{self.model}: {self.numel:,} parameters, {self.dtype}, {self.units} units"
        yield (
            "a step",
            f"{self.batch} text{'s' * (self.batch != 1)} of {self.sequence:,} tokens, "
            f"{self.flops / 1e12:.3g} TFLOP, "
            f"{self.optimizer}, activations: {self.activations}",
        )
        yield "machine", f"{self.machine} ({self.machine_note})"
        budgets = [f"host {_limit(self.host_bytes)}"]
        budgets += [f"device {format_size(self.device_bytes)}"] if self.device_bytes else []
        budgets += [f"{self.drives} drive{'s' * (self.drives != 1)}" if self.drives else "no drive"]
        yield "budgets", ", ".join(budgets)

    def _bytes(self) -> Iterator[tuple[str, str]]:
        for kind, parts in self.tiers.items():
            each = [f"{tier} {format_size(nbytes)}" for tier, nbytes in parts.items() if nbytes]
            total = format_size(sum(parts.values()))
            yield kind, f"{total:>9}: {', '.join(each)}" if each else "none"
        yield "host memory taken", format_size(self.taken_bytes)
        if self.disk_room_bytes:
            yield "disk space taken", format_size(self.disk_room_bytes)
        read, written = format_size(self.read_bytes), format_size(self.written_bytes)
        moved = [f"disk {read} read, {written} written"]
        if self.spilled_bytes:
            moved[0] += f", {format_size(self.spilled_bytes)} of each are gradients"
        if self.device_bytes:
            there, back = format_size(self.to_device_bytes), format_size(self.to_host_bytes)
            moved.append(f"device {there} to it, {back} from it")
        yield "moved each step", "; ".join(moved)
        yield f"{self.steps:,} steps write", self._wear()
        each_s = self.saving.each_s
        yield (
            "a checkpoint",
            format_size(self.saving.each_bytes)
            + ("" if each_s is None else f", {_time(each_s)}")
            + (f", {self.saving.count} of them" if self.saving.count else "")
            + "; room for two while one is written",
        )

    def _wear(self) -> str:
        wear = self.wear
        text = f"{_number(wear.written_tb)} TB"
        if wear.share is not None and wear.endurance_tb is not None:
            text += (
                f": {100 * wear.share:.2g} % of what {self.drives} drive{'s' * (self.drives != 1)} "
                f"rated for {wear.endurance_tb:g} TB can take"
            )
        return text

    def _times(self) -> Iterator[tuple[str, str]]:
        timing = self.timing
        if timing is None:
            yield "a step takes", "not predicted: " + self.machine_note
            return
        yield (
            "a step takes",
            f"{_time(timing.step_s)}, {_number(timing.tokens_per_s)} tokens/s; "
            f"{self.steps:,} steps {_time(timing.training_s)}",
        )
        yield "  of that", timing.large_parts(_time, other=timing.other_s)
        yield "limited by", f"{timing.limit}: {_time(timing.limit_s)} at the very least"
        yield "prefetch depth", f"{timing.depth} units"
        hidden = timing.hidden_tokens
        if self.read_bytes or self.written_bytes:
            yield (
                "drives are hidden",
                f"from {hidden:,} tokens a step on" if hidden else "at no number of tokens",
            )
        for name, seconds in timing.gains.items():
            yield f"  {name}", f"{_time(seconds)} less a step" if seconds > 0 else "nothing"

    def _advice(self) -> Iterator[tuple[str, str]]:
        for name, nbytes in self.least.items():
            yield f"smallest {name}", f"{format_size(nbytes)} ({nbytes} bytes)"
        if self.tuned is not None:
            yield "tuned", self.tuned
        for note in self.notes:
            yield "note", note
        for problem in self.problems:
            yield "PROBLEM", problem
        yield "verdict", self._verdict()

    def _verdict(self) -> str:
        if self.problems:
            return "does not fit as it is"
        if self.fits_without_us:
            return f"fits without offload: plain torch needs {format_size(self.plain_bytes)}"
        away = sum(parts.get("disk", 0) for parts in self.tiers.values())
        if away:
            return f"works, with {format_size(away)} on the drives"
        return "works, with all of it in host memory"


def _limit(nbytes: int | None) -> str:
    return "without limit" if nbytes is None else format_size(nbytes)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _time(seconds: float) -> str:
    """Format a duration in the largest unit of which there are two or more, down to seconds."""
    for unit, length in (("days", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return show_seconds(seconds)


def show_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
