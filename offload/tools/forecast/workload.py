"""One iteration of training as numbers: what is used in which order, and how long it computes.

Made from a recorded run, or drawn up for a model that has never run; what a machine's drives and
copies do to it is the business of `simulator`. Knows no clock and no tensor. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from offload.core.errors import FormatError
from offload.core.step_fact import StepFact
from offload.core.timeline import COMPUTE, DISK_READS, DISK_WRITES, STEP, WAITING, Event, in_turn
from offload.telemetry.run_file import ParamFact, Run, UnitFact

FORWARD, BACKWARD, EVALUATION = 0, 1, 2
_PHASES = {"forward": FORWARD, "backward": BACKWARD, "evaluation": EVALUATION}
_DEVICE_WAIT = "device copy"
_WARM_UP = 2  # first steps, which make memory and learn the order


@dataclass(frozen=True)
class WorkloadUse:
    """A unit is used. phase: 0 forward, 1 backward, 2 evaluation. compute_s: until the next use of
    any, waiting left out, while the drives are idle.
    """

    phase: int
    unit: int
    compute_s: float


@dataclass(frozen=True)
class Workload:
    """One iteration. units: none where the model is not prepared. uses: in order. between_s: of an
    iteration outside of uses and `step()`: loading, clipping, all of a model that is not prepared.
    activation_bytes: that autograd keeps until backward. logits_bytes: beside them, at the largest
    moment. flops: of the whole iteration. tokens: of one. 0: not known.
    """

    title: str
    units: tuple[UnitFact, ...]
    params: tuple[ParamFact, ...]
    uses: tuple[WorkloadUse, ...]
    between_s: float
    activation_bytes: int
    logits_bytes: int
    flops: float
    tokens: int
    dtype: str
    device: str

    @property
    def compute_s(self) -> float:
        """Of the model, with nothing to wait for."""
        return sum(use.compute_s for use in self.uses)

    @property
    def param_bytes(self) -> int:
        if self.units:
            return sum(unit.nbytes for unit in self.units)
        return sum(param.numel * param.element_bytes for param in self.params)

    def scaled(self, factor: float) -> Workload:
        """The same where all computing takes `factor` times as long."""
        uses = tuple(replace(use, compute_s=use.compute_s * factor) for use in self.uses)
        return replace(self, uses=uses, between_s=self.between_s * factor)

    @classmethod
    def of_run(cls, run: Run, compute_beside_disk: float = 1.0) -> Workload:
        """A recorded run's usual iteration: medians over those of its iterations that have the
        usual uses. compute_beside_disk: how fast that machine computes while its drives work; it
        is taken out of the times. What runs on a device is not seen by the thread that hands it
        over: there the time of both passes is divided by the sizes of units, twice for backward.
        Raises `FormatError` where the run has no two whole steps.
        """
        about = run.about
        uses: tuple[WorkloadUse, ...] = ()
        device = about.device.partition(":")[0]
        if about.units and about.order:
            events = run.events if device == "cpu" else _without_device_waits(run.events)
            uses, between_s = _usual(_iterations(events, compute_beside_disk), about.title)
            uses = uses if device == "cpu" else _by_size(uses, about.units)
        else:
            between_s = _between_steps(about.steps, about.title)
        small = bool(about.params) and all(param.element_bytes == 2 for param in about.params)
        return cls(
            title=about.title,
            units=about.units,
            params=about.params,
            uses=uses,
            between_s=between_s,
            activation_bytes=_sent_away(about.steps),
            logits_bytes=0,
            flops=0.0,
            tokens=0,
            dtype="bfloat16" if small else "float32",
            device=device,
        )


@dataclass(frozen=True)
class Budgets:
    """What training may take. None: no limit. directories: on drives; 0: there is no disk.
    activations: keep, recompute or offload.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None
    directories: int = 1
    activations: str = "keep"


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
    """From the end of each step to the begin of the next."""
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
    begins = [e for e, last in _with_last(computing) if _is_new(e, last, waits)]
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


def _without_device_waits(events: Sequence[Event]) -> list[Event]:
    """Who waits for a device waits for what it computes."""
    return [e for e in events if e.row != WAITING or not e.name.startswith(_DEVICE_WAIT)]


def _by_size(uses: Sequence[WorkloadUse], units: Sequence[UnitFact]) -> tuple[WorkloadUse, ...]:
    """The same time in all, in proportion to what a unit has to compute with."""
    sizes = [sum(units[n].nbytes for n in units[use.unit].needs) or 1 for use in uses]
    weights = [n * (2 if use.phase == BACKWARD else 1) for n, use in zip(sizes, uses, strict=True)]
    each_s = sum(use.compute_s for use in uses) / sum(weights)
    return tuple(replace(u, compute_s=w * each_s) for u, w in zip(uses, weights, strict=True))


def _with_last(events: Sequence[Event]) -> Iterable[tuple[Event, Event | None]]:
    return zip(events, [None, *events], strict=False)


def _is_new(event: Event, last: Event | None, waits: Sequence[Event]) -> bool:
    """Whether a use begins here, and does not go on after a wait."""
    if last is None or event.name != last.name or event.begin_s <= last.end_s:
        return True
    return not _overlap_s(waits, last.end_s, event.begin_s)


def _parse(name: str) -> tuple[int, int]:
    """`backward 3: blocks.2` -> 1, 3."""
    phase, _, rest = name.partition(" ")
    unit = rest.partition(":")[0]
    if phase not in _PHASES or not unit.isdecimal():
        raise FormatError(f"events: expected a use like 'forward 3: a name', got {name[:80]!r}")
    return _PHASES[phase], int(unit)


def _overlap_s(events: Iterable[Event], begin_s: float, end_s: float) -> float:
    """events: without overlap among themselves."""
    each = (min(end_s, e.end_s) - max(begin_s, e.begin_s) for e in events)
    return sum(seconds for seconds in each if seconds > 0)


def _between_steps(steps: Sequence[StepFact], title: str) -> float:
    """Of a run whose uses are not known: all that is no step."""
    gaps = [b.begin_s - a.end_s for a, b in pairwise(steps)]
    if not gaps:
        raise FormatError(f"{title}: expected two steps, got {len(steps)}; train some steps longer")
    return max(0.0, median(gaps[_WARM_UP:] or gaps))


def _sent_away(steps: Sequence[StepFact]) -> int:
    """Bytes of activations that left memory in an iteration; 0 where they were kept."""
    sent = [step.counts.get("activations_offloaded_bytes", 0) for step in steps]
    return int(median(sent[_WARM_UP:] or sent)) if sent else 0
