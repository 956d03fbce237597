"""The simulator: how long an iteration of training takes on a machine, and what it moves, found by
the engine in virtual time.

What the engine decides is decided by its own code (`params/trace`, `params/prefetch`,
`params/residency`, `params/block_staging`, `optim/pipeline`, `planning/shares`,
`planning/planner`), on memory without bytes. What machines do is a model:

* The drives are one queue. Its speed is the profile's for reads, for writes, or for both mixed, by
  what is in flight; requests that a thread waits for go first, then prefetches, then writes. A
  request costs nothing beside its bytes.
* The model computes as long as the workload says, slower by `compute_beside_disk` while the drives
  work; the update takes its bytes over `update_bytes_per_s`, slower by `update_beside_disk`.
* To find external edits, the engine reads the parameters in memory, as fast as a copy moves bytes
  (`memory_bytes_per_s`).
* Gradients that are spilled are written once and read once, among all else that goes through the
  store.
* A device has a queue for copies each way. It computes a unit when its uploads have ended.

No number is fitted to a step's time: all come from the profile or the workload. The simulation
allocates no memory for tensors and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from offload.core.errors import ConfigError
from offload.core.timeline import OTHER
from offload.params.gradients import STAGING_MOST_BYTES, STAGING_PLACES
from offload.planning.layout import ParamSpec, round_up
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.profile import Profile, Tuning
from offload.planning.training import TrainingPlan, plan_training
from offload.planning.tuning import UNTUNED
from offload.planning.unit import PAGE, UnitSizes
from offload.storage.engine import DEPTH
from offload.telemetry.run_file import ParamFact, UnitFact
from offload.tools.forecast.extrapolation import Sample, plan_of_sample, weighted
from offload.tools.forecast.forecast import StepTime
from offload.tools.forecast.simulation.device import COMPUTING
from offload.tools.forecast.simulation.gradients import COPY, in_order_of_units
from offload.tools.forecast.simulation.training import (
    AHEAD,
    BETWEEN,
    COMPUTE,
    DEVICE,
    DISK,
    DOWN,
    LOOKING,
    MODEL,
    STEP,
    UP,
    UPDATE,
    WHOLE,
    Training,
)
from offload.tools.forecast.workload import Workload

DEVICE_IDLE = f"{MODEL}the device waits"
READ, WRITTEN = "disk_read_bytes", "disk_written_bytes"
DISK_READ = "disk read"  # the cause of a wait for state
_ITERATIONS = (
    2  # of a large model: a third one is like the second, but for a few per cent of copies
)
_LITTLE_NUMEL = 2 * 10**9  # trained parameters, beside which such copies count
_LEARNING = 2  # first iterations: the trace is not recorded yet, and there is no state
_ALIGN_BYTES = 64  # of a gradient's place
_ELSE = (BETWEEN, LOOKING, COPY, OTHER)  # causes that are neither computing nor waiting


@dataclass(frozen=True)
class Outcome(StepTime):
    """The outcome of a simulation: one steady iteration.

    step_s: the whole iteration. read_bytes, written_bytes: as a report counts them; both include
    spilled_bytes of gradients.
    """

    read_bytes: int
    written_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    host_bytes_taken: int
    disk_bytes: int
    params_on_host_bytes: int
    spilled_bytes: int
    hits: int
    misses: int
    disk_busy_s: float

    @property
    def stalled_s(self) -> float:
        return sum(self.stalls.values())


def plan_of(work: Workload, budgets: Budgets) -> TrainingPlan:
    """Plan the workload within the budgets. Raises `CapacityError` with the arithmetic if they
    cannot work, as `prepare` and `wrap` do.
    """
    return plan_training(facts_of(work, budgets.offloads_activations), budgets)


def facts_of(work: Workload, offloads_activations: bool) -> TrainingFacts:
    """Gather the facts that the plan depends on. What the engine measures on a device while it runs
    is known here.
    """
    others = work.logits_bytes + (0 if offloads_activations else work.activation_bytes)
    return _facts(work.params, work.units, work.device, others)


@lru_cache(maxsize=8)  # one model is planned within many budgets
def _facts(
    params: tuple[ParamFact, ...], units: tuple[UnitFact, ...], device: str, others_bytes: int
) -> TrainingFacts:
    specs = tuple(map(_spec, params))
    if not units:
        return TrainingFacts(specs)
    sizes = UnitSizes(
        tuple(unit.nbytes for unit in units),
        tuple(unit.needs for unit in units),
        frozenset(n for n, unit in enumerate(units) if unit.is_kept),
        frozenset(n for n, unit in enumerate(units) if unit.is_weight_block),
    )
    largest = max((param.grad_bytes for param in params), default=0)
    staging = STAGING_PLACES * round_up(min(largest, STAGING_MOST_BYTES), PAGE)
    return TrainingFacts(
        specs,
        is_prepared=True,
        units=sizes,
        gradients=tuple(
            round_up(params[n].grad_bytes, _ALIGN_BYTES) for n in in_order_of_units(params)
        ),
        staging_bytes=staging if device != "cpu" else 0,
        others_bytes=others_bytes,
    )


def _spec(fact: ParamFact) -> ParamSpec:
    there = fact.element_bytes if fact.is_on_device and fact.unit is None else 0
    return ParamSpec(fact.name, fact.numel, fact.fields, there, fact.unit)


def simulate(
    work: Workload,
    budgets: Budgets,
    machine: Profile,
    tuning: Tuning = UNTUNED,
    iterations: int = 4,
    plan: TrainingPlan | None = None,
) -> Outcome:
    """Simulate training and return one steady iteration of `work` within `budgets` on `machine`:
    the mean of the iterations after the first two, or the last one if there are no more. plan: if
    it is made already. Raises `CapacityError` if the budgets cannot work, as the engine does, and
    `ConfigError` if the profile lacks a speed that matters.
    """
    if iterations < 1:
        raise ConfigError(f"iterations: expected 1 or more, got {iterations}")
    plan = plan or plan_of(work, replace(budgets, chunk_numel=tuning.chunk_numel))
    mean = _steady(Training(work, plan, machine, tuning), iterations)
    return _outcome(mean, plan, work.device != "cpu")


def simulate_samples(
    samples: Sequence[Sample],
    plan: TrainingPlan,
    machine: Profile,
    tuning: Tuning = UNTUNED,
) -> Outcome:
    """Simulate models with fewer layers than the one of the plan, and return what follows for that
    one.
    """
    found, offloads = [], plan.budgets.offloads_activations
    for sample in samples:
        joined = max(1, sample.joined_numel // plan.state.chunk_numel)
        work = sample.work
        few = plan_of_sample(plan, facts_of(work, offloads), joined, work.logits_bytes)
        depth = (tuning.queue_depth or DEPTH) * joined  # as many bytes of larger requests
        training = Training(work, few, machine, replace(tuning, queue_depth=depth))
        is_quick = len(samples) == 1 or work.trained_numel < _LITTLE_NUMEL
        mean = _steady(training, _ITERATIONS + is_quick)
        kept = few.state.buffers * joined - plan.state.buffers  # chunks that stay in buffers
        _count_again(mean, max(0, kept) * plan.state.buffer_bytes)
        found.append((sample.weight, mean))
    mean = weighted(found)
    mean[AHEAD] = found[-1][1][AHEAD]
    return _outcome(mean, plan, samples[0].work.device != "cpu")


def _count_again(mean: dict[str, float], nbytes: int) -> None:
    """Count bytes of state that were not moved, because so many larger chunks stay in buffers from
    one step to the next: they would be read and written, and where a step waits for the drives, it
    would wait for them, too.
    """
    moved = mean.get(READ, 0.0) + mean.get(WRITTEN, 0.0)
    if not nbytes or not moved or not mean.get(DISK):
        return
    seconds = 2 * nbytes * mean[DISK] / moved
    mean[READ] = mean.get(READ, 0.0) + nbytes
    mean[WRITTEN] = mean.get(WRITTEN, 0.0) + nbytes
    mean[DISK] += seconds
    waited = f"{STEP}{DISK_READ}"
    if mean.get(waited, 0.0) > seconds:
        mean[waited] += seconds
        mean[WHOLE] += seconds


def _steady(training: Training, iterations: int) -> dict[str, float]:
    """Run iterations, and return the mean of those after the first two."""
    spent = [training.iterate() for _ in range(iterations)]
    last = spent[_LEARNING:] or spent[-1:]
    names = dict.fromkeys(name for one in last for name in one)
    mean = {name: sum(one.get(name, 0.0) for one in last) / len(last) for name in names}
    mean[AHEAD] = spent[-1][AHEAD]
    return mean


def _outcome(mean: Mapping[str, float], plan: TrainingPlan, on_device: bool) -> Outcome:
    update_s = mean.get(f"{STEP}{UPDATE}", 0.0)
    # The passes of a model that is not prepared are all that is between steps.
    passes = COMPUTE if plan.facts.is_prepared else BETWEEN
    compute_s = mean[DEVICE] if on_device else mean.get(f"{MODEL}{passes}", 0.0)
    else_ = [cause for cause in _ELSE if cause != passes]
    each_s = (mean.get(f"{MODEL}{c}", 0.0) + mean.get(f"{STEP}{c}", 0.0) for c in else_)
    stalls = _stalls(mean, compute_s if on_device else None)
    has_to_do = {"compute and update": compute_s + update_s + sum(each_s)}
    has_to_do |= {name: mean.get(name, 0.0) for name in (DISK, UP, DOWN)}
    limit = max(has_to_do, key=lambda name: has_to_do[name])

    def count(name: str) -> int:
        return max(0, round(mean.get(name, 0.0)))

    return Outcome(
        step_s=mean[WHOLE],
        compute_s=compute_s,
        update_s=update_s,
        stalls=stalls,
        read_bytes=count(READ),
        written_bytes=count(WRITTEN),
        to_device_bytes=count("host_to_device_bytes"),
        to_host_bytes=count("device_to_host_bytes"),
        depth=count(AHEAD),
        limit=limit,
        limit_s=has_to_do[limit],
        host_bytes_taken=plan.host_bytes,
        disk_bytes=plan.disk_room_bytes,
        params_on_host_bytes=plan.params_on_host_bytes,
        other_s=max(0.0, mean[WHOLE] - compute_s - update_s - sum(stalls.values())),
        spilled_bytes=count("spilled_bytes"),
        hits=count("parameter_hits"),
        misses=count("parameter_misses"),
        disk_busy_s=mean.get(DISK, 0.0),
    )


def _stalls(mean: Mapping[str, float], device_s: float | None) -> dict[str, float]:
    """Return the seconds waited, by where and why. device_s: seconds that a device computes. It
    does so while the thread that trains waits or goes on, so outside of steps only the device's own
    waiting counts.
    """
    busy = {f"{where}{cause}" for where in (STEP, MODEL) for cause in (COMPUTE, UPDATE, *_ELSE)}
    found = {name: s for name, s in mean.items() if name.startswith(STEP) and name not in busy}
    model = {name: s for name, s in mean.items() if name.startswith(MODEL)}
    if device_s is None:
        found |= {name: s for name, s in model.items() if name not in busy}
    else:
        # When the step begins, the thread waits until the device has ended the passes.
        passes_s = sum(s for name, s in model.items() if name.removeprefix(MODEL) not in _ELSE)
        passes_s += found.pop(f"{STEP}{COMPUTING}", 0.0)
        found[DEVICE_IDLE] = max(0.0, passes_s - device_s)
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}
