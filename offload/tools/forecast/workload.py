"""One iteration of training as numbers: the units in the order of their uses, and how long each use
computes.

A workload is made from a recorded run, or for a model that has never run; `simulator` adds the
drives and copies of a machine. No clock is read and no tensor is used here. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from offload.core.errors import FormatError
from offload.core.timeline import (
    COMPUTE,
    DISK_READS,
    DISK_WRITES,
    STEP,
    WAITING,
    Event,
    StepFact,
    in_turn,
)
from offload.telemetry.run_file import ParamFact, Run, UnitFact

FORWARD, BACKWARD, EVALUATION = 0, 1, 2
_PHASES = {"forward": FORWARD, "backward": BACKWARD, "evaluation": EVALUATION}
_DEVICE_WAIT = "device copy"
_WARM_UP = 2  # first steps, which allocate memory and record the trace


@dataclass(frozen=True)
class WorkloadUse:
    """A use of a unit. phase: 0 forward, 1 backward, 2 evaluation. compute_s: seconds until the
    next use of any unit, without waiting, while the drives are idle.
    """

    phase: int
    unit: int
    compute_s: float


@dataclass(frozen=True)
class Workload:
    """The workload of one iteration.

    units: none if the model is not prepared. uses: in order. between_s: seconds outside of uses and
    `step()`: loading, clipping, all of a model that is not prepared. activation_bytes: what
    autograd keeps until backward. logits_bytes: beside them, at the largest moment. tokens: of the
    whole iteration. 0: not known.
    """

    units: tuple[UnitFact, ...]
    params: tuple[ParamFact, ...]
    uses: tuple[WorkloadUse, ...]
    between_s: float
    activation_bytes: int
    logits_bytes: int
    tokens: int
    dtype: str
    device: str

    @property
    def compute_s(self) -> float:
        """The seconds that the model computes if it never waits."""
        return sum(use.compute_s for use in self.uses)

    @property
    def trained_numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def param_bytes(self) -> int:
        if self.units:
            return sum(unit.nbytes for unit in self.units)
        return sum(param.numel * param.element_bytes for param in self.params)

    def scaled(self, factor: float) -> Workload:
        """Return the same workload with all computing taking `factor` times as long."""
        uses = tuple(replace(use, compute_s=use.compute_s * factor) for use in self.uses)
        return replace(self, uses=uses, between_s=self.between_s * factor)

    @classmethod
    def of_run(cls, run: Run, compute_beside_disk: float = 1.0) -> Workload:
        """Derive the usual iteration of a recorded run: medians over those of its iterations that
        have the most frequent order of uses.

        compute_beside_disk: the share of its speed with which that machine computes while its
        drives work; the times are corrected for it. The thread that submits work to a device does
        not see how long each use computes there: the time of both passes is divided by the sizes of
        units, twice for backward. Raises `FormatError` if the run has no two whole steps.
        """
        about = run.about
        uses: tuple[WorkloadUse, ...] = ()
        device = about.device.partition(":")[0]
        if about.units and about.order:
            # On a device, waits for it are the time that it computes.
            computing = () if device == "cpu" else (_DEVICE_WAIT,)
            events = [e for e in run.events if e.row != WAITING or not e.name.startswith(computing)]
            uses, between_s = _usual(_iterations(events, compute_beside_disk), about.title)
            uses = uses if device == "cpu" else _by_size(uses, about.units)
        else:
            between_s = _between_steps(about.steps, about.title)
        small = bool(about.params) and all(param.element_bytes == 2 for param in about.params)
        return cls(
            units=about.units,
            params=about.params,
            uses=uses,
            between_s=between_s,
            activation_bytes=_sent_away(about.steps),
            logits_bytes=0,
            tokens=0,
            dtype="bfloat16" if small else "float32",
            device=device,
        )


# --- from a run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RecordedIteration:
    uses: tuple[WorkloadUse, ...]
    between_s: float

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        return tuple((use.phase, use.unit) for use in self.uses)


def _usual(
    iterations: Sequence[_RecordedIteration], title: str
) -> tuple[tuple[WorkloadUse, ...], float]:
    if not iterations:
        raise FormatError(
            f"{title}: expected the events of two steps one after the other, and what was computed "
            "between them; train some steps longer before save_trace"
        )
    later = iterations[_WARM_UP:] or iterations
    order = Counter(one.order for one in later).most_common(1)[0][0]
    alike = [one for one in later if one.order == order]
    seconds = [median(one.uses[n].compute_s for one in alike) for n in range(len(order))]
    uses = tuple(WorkloadUse(*use, compute_s=s) for use, s in zip(order, seconds, strict=True))
    return uses, median(one.between_s for one in alike)


def _iterations(events: Sequence[Event], beside_disk: float) -> list[_RecordedIteration]:
    """Divide the events into iterations, each from the end of a step to the begin of the next."""
    steps = sorted((e for e in events if e.row == STEP), key=lambda event: event.begin_s)
    computing = sorted((e for e in events if e.row == COMPUTE), key=lambda event: event.begin_s)
    waits = in_turn(event for event in events if event.row == WAITING)
    disk = in_turn(event for event in events if event.row in (DISK_READS, DISK_WRITES))
    found = []
    for before, after in pairwise(steps):
        begin_s, end_s = before.end_s, after.begin_s
        here = [e for e in computing if begin_s <= e.begin_s and e.end_s <= end_s]
        if here:
            idle = [e for e in waits if begin_s <= e.begin_s and e.end_s <= end_s]
            busy = [e for e in disk if e.end_s > begin_s and e.begin_s < end_s]
            found.append(_iteration(here, idle, busy, end_s - begin_s, beside_disk))
    return found


def _iteration(
    computing: Sequence[Event],
    waits: Sequence[Event],
    disk: Sequence[Event],
    seconds: float,
    beside_disk: float,
) -> _RecordedIteration:
    lasts = (None, *computing)
    begins = [e for e, last in zip(computing, lasts, strict=False) if _is_new(e, last, waits)]
    ends_s = [event.begin_s for event in begins[1:]] + [computing[-1].end_s]
    uses, left_s = [], seconds
    for event, end_s in zip(begins, ends_s, strict=True):
        phase, unit = _parse(event.name)
        waited_s = _overlap_s(waits, event.begin_s, end_s)
        computed_s = max(0.0, end_s - event.begin_s - waited_s)
        left_s -= computed_s + waited_s
        shared_s = min(computed_s, _overlap_s(disk, event.begin_s, end_s))
        uses.append(WorkloadUse(phase, unit, computed_s - shared_s * (1.0 - beside_disk)))
    return _RecordedIteration(tuple(uses), max(0.0, left_s))


def _by_size(uses: Sequence[WorkloadUse], units: Sequence[UnitFact]) -> tuple[WorkloadUse, ...]:
    """Divide the same total time in proportion to the parameters that each use computes with; a
    backward use counts twice.
    """
    sizes = [sum(units[n].nbytes for n in units[use.unit].needs) or 1 for use in uses]
    weights = [n * (2 if use.phase == BACKWARD else 1) for n, use in zip(sizes, uses, strict=True)]
    each_s = sum(use.compute_s for use in uses) / sum(weights)
    return tuple(replace(u, compute_s=w * each_s) for u, w in zip(uses, weights, strict=True))


def _is_new(event: Event, last: Event | None, waits: Sequence[Event]) -> bool:
    """Return whether a use begins with this event, and does not go on after a wait."""
    if last is None or event.name != last.name or event.begin_s <= last.end_s:
        return True
    return not _overlap_s(waits, last.end_s, event.begin_s)


def _parse(name: str) -> tuple[int, int]:
    """Parse phase and unit: `backward 3: blocks.2` -> 1, 3."""
    phase, _, rest = name.partition(" ")
    unit = rest.partition(":")[0]
    if phase not in _PHASES or not unit.isdecimal():
        raise FormatError(f"events: expected a use like 'forward 3: a name', got {name[:80]!r}")
    return _PHASES[phase], int(unit)


def _overlap_s(events: Iterable[Event], begin_s: float, end_s: float) -> float:
    """Sum the seconds of `events` between two moments. events: without overlap among themselves."""
    each = (min(end_s, e.end_s) - max(begin_s, e.begin_s) for e in events)
    return sum(seconds for seconds in each if seconds > 0)


def _between_steps(steps: Sequence[StepFact], title: str) -> float:
    """Return the seconds between steps, for a run whose uses are not known."""
    gaps = [b.begin_s - a.end_s for a, b in pairwise(steps)]
    if not gaps:
        raise FormatError(f"{title}: expected two steps, got {len(steps)}; train some steps longer")
    return max(0.0, median(gaps[_WARM_UP:] or gaps))


def _sent_away(steps: Sequence[StepFact]) -> int:
    """Return the bytes of activations that were offloaded in an iteration; 0 if they were kept."""
    sent = [step.counts.get("activations_offloaded_bytes", 0) for step in steps]
    return int(median(sent[_WARM_UP:] or sent)) if sent else 0
