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

from offload.core.errors import ConfigError
from offload.core.step_fact import OTHER
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuning
from offload.planning.training import TrainingPlan
from offload.planning.tuning import UNTUNED
from offload.tools.forecast.simulation.device import COMPUTING
from offload.tools.forecast.simulation.facts import plan_of
from offload.tools.forecast.simulation.gradients import COPY
from offload.tools.forecast.simulation.training import (
    BETWEEN,
    COMPUTE,
    UPDATE,
    Training,
    VirtualIterationCosts,
)
from offload.tools.forecast.simulation.world import DEVICE, DISK, DOWN, LOOKING, UP, make_world
from offload.tools.forecast.workload import Workload

STEP, MODEL = "step(): ", "model: "  # where the wait is, as in a run's file
DEVICE_IDLE = f"{MODEL}the device waits"
_LEARNING = 2  # first iterations: the trace is not recorded yet, and there is no state
_ELSE = (BETWEEN, LOOKING, COPY, OTHER)  # causes that are neither computing nor waiting


@dataclass(frozen=True)
class Outcome:
    """The outcome of a simulation: one steady iteration.

    step_s: the whole iteration. stalls: seconds waited, by where and why. other_s: neither
    computed, updated nor waited. read_bytes, written_bytes: as a report counts them; both include
    spilled_bytes of gradients. limit: the resource that would take longest if all worked at once
    without waiting; it would take limit_s.
    """

    step_s: float
    compute_s: float
    update_s: float
    stalls: dict[str, float]
    read_bytes: int
    written_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    depth: int
    limit: str
    limit_s: float
    host_bytes_taken: int
    disk_bytes: int
    params_on_host_bytes: int
    other_s: float
    spilled_bytes: int
    hits: int
    misses: int
    disk_busy_s: float

    @property
    def stalled_s(self) -> float:
        return sum(self.stalls.values())


def simulate(
    work: Workload,
    budgets: Budgets,
    machine: Profile,
    tuning: Tuning = UNTUNED,
    iterations: int = 4,
) -> Outcome:
    """Simulate training and return one steady iteration of `work` within `budgets` on `machine`:
    the mean of the iterations after the first two, or the last one if there are no more. Raises
    `CapacityError` if the budgets cannot work, as the engine does, and `ConfigError` if the profile
    lacks a speed that matters.
    """
    if iterations < 1:
        raise ConfigError(f"iterations: expected 1 or more, got {iterations}")
    plan = plan_of(work, replace(budgets, chunk_numel=tuning.chunk_numel))
    return simulate_plan(work, plan, machine, tuning, iterations)


def simulate_plan(
    work: Workload, plan: TrainingPlan, machine: Profile, tuning: Tuning, iterations: int
) -> Outcome:
    """Simulate training as `simulate` does, by a plan that is made already."""
    training = Training(work, plan, make_world(work, machine, tuning, plan))
    spent = [training.iterate() for _ in range(iterations)]
    mean = _mean_of(spent[_LEARNING:] or spent[-1:])
    return _outcome(mean, plan, work.device != "cpu")


def _mean_of(spent: Sequence[VirtualIterationCosts]) -> VirtualIterationCosts:
    """Return the mean of some iterations, with the depth of the last."""

    def mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for one in each for name in one)
        return {name: sum(one.get(name, 0.0) for one in each) / len(each) for name in names}

    return VirtualIterationCosts(
        sum(one.seconds for one in spent) / len(spent),
        mean([one.model for one in spent]),
        mean([one.step for one in spent]),
        mean([one.counts for one in spent]),
        mean([one.busy for one in spent]),
        spent[-1].depth,
    )


def _outcome(mean: VirtualIterationCosts, plan: TrainingPlan, on_device: bool) -> Outcome:
    update_s = mean.step.get(UPDATE, 0.0)
    compute_s = mean.busy[DEVICE] if on_device else mean.model.get(COMPUTE, 0.0)
    else_s = sum(mean.model.get(cause, 0.0) + mean.step.get(cause, 0.0) for cause in _ELSE)
    stalls = _stalls(mean, compute_s if on_device else None)
    limit, limit_s = _limit(mean, compute_s + update_s + else_s)

    def count(name: str) -> int:
        return round(mean.counts.get(name, 0.0))

    return Outcome(
        step_s=mean.seconds,
        compute_s=compute_s,
        update_s=update_s,
        stalls=stalls,
        read_bytes=count("disk_read_bytes"),
        written_bytes=count("disk_written_bytes"),
        to_device_bytes=count("host_to_device_bytes"),
        to_host_bytes=count("device_to_host_bytes"),
        depth=mean.depth,
        limit=limit,
        limit_s=limit_s,
        host_bytes_taken=plan.host_bytes,
        disk_bytes=plan.disk_room_bytes,
        params_on_host_bytes=plan.params_on_host_bytes,
        other_s=max(0.0, mean.seconds - compute_s - update_s - sum(stalls.values())),
        spilled_bytes=count("spilled_bytes"),
        hits=count("parameter_hits"),
        misses=count("parameter_misses"),
        disk_busy_s=mean.busy.get(DISK, 0.0),
    )


def _stalls(mean: VirtualIterationCosts, device_s: float | None) -> dict[str, float]:
    """Return the seconds waited, by where and why. device_s: seconds that a device computes. It
    does so while the thread that trains waits or goes on, so outside of steps only the device's own
    waiting counts.
    """
    work = {COMPUTE, UPDATE, *_ELSE}
    found = {f"{STEP}{cause}": s for cause, s in mean.step.items() if cause not in work}
    if device_s is None:
        found |= {f"{MODEL}{cause}": s for cause, s in mean.model.items() if cause not in work}
    else:
        # When the step begins, the thread waits until the device has ended the passes.
        passes_s = sum(s for cause, s in mean.model.items() if cause not in _ELSE)
        passes_s += found.pop(f"{STEP}{COMPUTING}", 0.0)
        found[DEVICE_IDLE] = max(0.0, passes_s - device_s)
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}


def _limit(mean: VirtualIterationCosts, work_s: float) -> tuple[str, float]:
    """Return the resource that has the most to do, and how long that takes alone."""
    has_to_do = {"compute and update": work_s}
    has_to_do |= {name: mean.busy.get(name, 0.0) for name in (DISK, UP, DOWN)}
    limit = max(has_to_do, key=lambda name: has_to_do[name])
    return limit, has_to_do[limit]
