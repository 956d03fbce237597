"""The forecast of a training: the answer, a table for people and numbers for scripts. `forecaster`
computes it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.tools.forecast.request import WRAP
from offload.tools.output import table

FORMAT = "offload forecast"
VERSION = 2
_SMALL_SHARE = 0.005  # of a step: parts that are smaller are not shown
HIDDEN_SHARE = 0.1  # of a step: drives that it waits for no longer than this are hidden
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60


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
    """The wear of the drives by all that a training writes. endurance_tb: what one drive is rated
    for; is_assumed: nobody has said so. share: of what all drives together are rated for. life_s:
    until they have written that, at this rate; None: nothing is written, or no time is known.
    """

    written_tb: float
    endurance_tb: float
    is_assumed: bool
    share: float
    life_s: float | None


@dataclass(frozen=True)
class Change:
    """A single change with which a training fits, and its step then. option: as it is given to
    `offload plan`. step_s: None if speeds are not known.
    """

    what: str
    option: str
    step_s: float | None
    tokens_per_s: float | None

    def __str__(self) -> str:
        if self.step_s is None or self.tokens_per_s is None:
            return f"{self.what} ({self.option})"
        step, rate = show_time(self.step_s), show_number(self.tokens_per_s)
        return f"{self.what} ({self.option}): {step} a step, {rate} tokens/s"


@dataclass(frozen=True)
class Misfit:
    """A training that does not fit, why, and which single changes would make it fit. `str()` is a
    table.
    """

    model: str
    machine: str
    budgets: str
    reason: str
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "works": False, **asdict(self)}

    def __str__(self) -> str:
        rows = [("verdict", "does not fit"), *change_rows(self.changes)]
        rows += [("model", self.model), ("machine", self.machine), ("budgets", self.budgets)]
        rows.append(("why", self.reason))
        return "\n".join(line.rstrip() for line in table(rows))


class MisfitError(CapacityError):
    """The error of a training that does not fit, with the changes that would make it fit."""

    def __init__(self, misfit: Misfit) -> None:
        advice = "; ".join(map(str, misfit.changes))
        super().__init__(misfit.reason + (f"; what fits: {advice}" if advice else ""))
        self.misfit = misfit


def change_rows(changes: tuple[Change, ...]) -> Iterator[tuple[str, str]]:
    if not changes:
        yield "what would fit", "no single change that is known here"
    for number, change in enumerate(changes):
        yield "what would fit" if not number else "  or", str(change)


@dataclass(frozen=True)
class Forecast:
    """A forecast of one training on one machine. `str()` is a table.

    host_bytes, device_bytes: budgets; None: no limit, or no device. tiers: bytes of each kind on
    each tier. read_bytes, written_bytes: by the drives in a step, as a report counts them; both
    include spilled_bytes of gradients. taken_bytes: host memory that the engine takes.
    passing_bytes: what activations and logits take where the model runs. least: the smallest
    budgets that work. plain_bytes: what torch alone would need in one place. call: the line of code
    that does it. changes: single ones that remove the problems.
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
    item: str
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
    use: str
    lora: int | None
    call: str
    changes: tuple[Change, ...] = ()
    tuned: str | None = None
    timing: Timing | None = None  # None: speeds are not known

    @property
    def works(self) -> bool:
        """Whether the forecast has found no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "works": self.works, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join([self.main_table, *self.gain_lines])

    @property
    def main_table(self) -> str:
        """The table without the gains: what matters most is on top."""
        rows = [*self._best(), *self._about(), *self._bytes(), *self._times(), *self._least()]
        return "\n".join(line.rstrip() for line in table(rows, width=None))

    @property
    def gain_lines(self) -> list[str]:
        """The lines that say what one more of each resource would save."""
        gains = self.timing.gains if self.timing is not None else {}
        rows = [
            (name, f"{show_time(seconds)} less a step" if seconds > 0 else "nothing")
            for name, seconds in gains.items()
        ]
        return table(rows, width=None) if rows else []

    def _best(self) -> Iterator[tuple[str, str]]:
        timing = self.timing
        yield "verdict", self._verdict()
        for problem in self.problems:
            yield "PROBLEM", problem
        if self.problems:
            yield from change_rows(self.changes)
        if timing is None:
            yield "a step takes", "not predicted: " + self.machine_note
        else:
            yield (
                "a step takes",
                f"{show_time(timing.step_s)}, {show_number(timing.tokens_per_s)} tokens/s; "
                f"{self.steps:,} steps {show_time(timing.training_s)}",
            )
            limit_s = show_time(timing.limit_s)
            yield "limited by", f"{timing.limit}, which needs {limit_s} of each step"
        if self.read_bytes or self.written_bytes:
            if timing is not None:
                hidden = timing.hidden_tokens
                yield (
                    "drives are hidden",
                    f"from {hidden:,} tokens a step on" if hidden else "at no number of tokens",
                )
            yield "life of the drives", self._life()
        yield "the call", self.call

    def _life(self) -> str:
        wear, drives = self.wear, f"{self.drives} drive{'s' * (self.drives != 1)}"
        rating = f"rated for {wear.endurance_tb:g} TB" + (" each" if self.drives > 1 else "")
        if wear.is_assumed:
            rating += " (assumed: common 1 TB drives are; --endurance)"
        if not wear.written_tb:
            return "nothing is written"
        text = f"{show_time(wear.life_s)} at this rate; " if wear.life_s is not None else ""
        written, share = show_number(wear.written_tb), show_number(100 * wear.share)
        return (
            f"{text}{self.steps:,} steps write {written} TB: {share} % of what {drives} "
            f"{rating} can take"
        )

    def _about(self) -> Iterator[tuple[str, str]]:
        adapters = f", adapters of rank {self.lora}" if self.lora else ""
        yield (
            "model",
            f"{self.model}: {self.numel:,} parameters{adapters}, {self.dtype}, {self.units} units",
        )
        yield (
            "a step",
            f"{self.batch} {self.item}{'s' * (self.batch != 1)} of {self.sequence:,} tokens, "
            f"{self.flops / 1e12:.3g} TFLOP, "
            f"{self.optimizer}, activations: {self.activations}",
        )
        yield "machine", f"{self.machine} ({self.machine_note})"
        yield "budgets", show_budgets(self.host_bytes, self.device_bytes, self.drives)

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
        each_s = self.saving.each_s
        yield (
            "a checkpoint",
            format_size(self.saving.each_bytes)
            + ("" if each_s is None else f", {show_time(each_s)}")
            + (f", {self.saving.count} of them" if self.saving.count else "")
            + "; room for two while one is written",
        )

    def _times(self) -> Iterator[tuple[str, str]]:
        if self.timing is not None:
            other_s = self.timing.other_s
            yield "parts of a step", self.timing.large_parts(show_time, other=other_s)
            if self.use != WRAP:
                yield "prefetch depth", f"{self.timing.depth} units"

    def _least(self) -> Iterator[tuple[str, str]]:
        for name, nbytes in self.least.items():
            yield f"smallest {name}", f"{format_size(nbytes)} ({nbytes} bytes)"
        if self.tuned is not None:
            yield "tuned", self.tuned
        for note in self.notes:
            yield "note", note

    def _verdict(self) -> str:
        if self.problems:
            return "does not fit as it is"
        if self.fits_without_us:
            return f"fits without offload: plain torch needs {format_size(self.plain_bytes)}"
        away = sum(parts.get("disk", 0) for parts in self.tiers.values())
        if away:
            return f"fits, with {format_size(away)} on the drives"
        return "fits, with all of it in host memory"


def show_budgets(host_bytes: int | None, device_bytes: int | None, drives: int) -> str:
    each = ["host " + ("without limit" if host_bytes is None else format_size(host_bytes))]
    each += [f"device {format_size(device_bytes)}"] if device_bytes else []
    each += [f"{drives} drive{'s' * (drives != 1)}" if drives else "no drive"]
    return ", ".join(each)


def show_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def show_time(seconds: float) -> str:
    """Format a duration in the largest unit of which there are two or more, down to seconds."""
    for unit, length in (("days", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return show_seconds(seconds)


def show_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
