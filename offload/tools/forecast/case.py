"""A case to forecast: a training within budgets on a machine, what it takes, and its step, which is
the engine's in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.planning.layout import round_up
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.profile import Profile, Tuning
from offload.planning.shares import share_out
from offload.planning.state_plan import RATED_TERABYTES_WRITTEN
from offload.planning.training import TrainingPlan
from offload.planning.unit import PAGE
from offload.tools.forecast.extrapolation import (
    Fineness,
    Sample,
    sample_sizes,
)
from offload.tools.forecast.footprint import Footprint
from offload.tools.forecast.forecast import (
    HIDDEN_SHARE,
    CheckpointCost,
    StepTime,
    Timing,
    Wear,
)
from offload.tools.forecast.machines import with_drives
from offload.tools.forecast.request import WRAP, ForecastRequest
from offload.tools.forecast.simulation.training import MODEL, STEP
from offload.tools.forecast.simulator import (
    Outcome,
    facts_of,
    plan_of,
    simulate,
    simulate_samples,
)
from offload.tools.forecast.workload import Workload

_GB = 10**9
_EXACT = 1e-3  # of the smallest budget: the search ends within this share
_ITERATIONS = 4  # two of them steady: which chunks stay in buffers differs from step to step
_FEWER_ITERATIONS = 3  # for a model so large that its buffers hardly matter
_LARGE_NUMEL = 2 * 10**9
_MANY_USES = 1200  # of units in an iteration: with fewer, all layers are simulated
_FEW_CHUNKS = 64  # into which state is cut to find whether a budget works
_PLAN_FINER = 2  # times as many chunks as in a simulation are planned, since a plan is cheap
_ORIGIN = (
    " (host_memory was not given: then it is what the machine has, less 20 % and at least 8 GiB, "
    "but no more than 40 %; or what is free of that on a machine whose profile is not known)"
)
_MOST_FACTOR = 1e6  # times as many tokens


@dataclass(frozen=True)
class ForecastCase:
    """A case to simulate. machine: with as many drives as the request asks for, and with a nominal
    value for every speed that is not known. known: what is known of it; None: speeds are missing.
    samples: models with fewer layers that are simulated instead of the whole one; none: it is.
    """

    request: ForecastRequest
    footprint: Footprint
    work: Workload
    budgets: Budgets
    machine: Profile
    known: Profile | None
    tuning: Tuning

    samples: tuple[Sample, ...] = ()

    @classmethod
    def of(
        cls,
        request: ForecastRequest,
        footprint: Footprint,
        budgets: Budgets,
        machine: Profile,
        known: Profile | None,
        tuning: Tuning,
    ) -> ForecastCase:
        """Make a case with the workload of that footprint, and with samples if it is large."""
        work = footprint.workload(request.optimizer, machine, request.use)
        case = cls(request, footprint, work, budgets, machine, known, tuning)
        has_many_uses = len(work.uses) > _MANY_USES
        if request.full or (case.numel < _LARGE_NUMEL and not has_many_uses):
            return case
        whole, fineness = footprint.count.whole, Fineness.of(case.numel)
        sizes = sample_sizes(whole, fineness) if has_many_uses else [(whole, 1.0)]
        samples = []
        for periods, weight in sizes:
            with footprint.shortened_to(periods) as few:
                small = few.workload(request.optimizer, machine, request.use)
                samples.append(Sample(small, weight, small.trained_numel // fineness.pieces))
        joined = case.numel // (fineness.pieces * _PLAN_FINER)
        budgets = replace(budgets, joined_numel=joined)
        return replace(case, samples=tuple(samples), budgets=budgets)

    @property
    def numel(self) -> int:
        return self.work.trained_numel

    @property
    def facts(self) -> TrainingFacts:
        return facts_of(self.work, self.budgets.offloads_activations)

    def plan(self) -> TrainingPlan:
        """Plan the training as the engine does. Raises `CapacityError` with the arithmetic, and
        with the budgets that would work, where these do not.
        """
        try:
            if self.budgets.device_bytes is not None:
                self.footprint.check_device(self.budgets.device_bytes, self.request.use)
            return plan_of(self.work, self.budgets)
        except CapacityError as error:
            least = ", ".join(f"{name} {format_size(n)}" for name, n in self.least.items())
            origin = _ORIGIN if self.request.host_bytes is None else ""
            raise CapacityError(f"{error}; smallest budgets that work: {least}{origin}") from error

    def run(self, plan: TrainingPlan | None = None) -> Outcome:
        """Simulate steady steps of the training."""
        plan = plan or plan_of(self.work, self.budgets)
        if self.samples:
            return simulate_samples(self.samples, plan, self.machine, self.tuning)
        count = _ITERATIONS if self.numel < _LARGE_NUMEL else _FEWER_ITERATIONS
        return simulate(self.work, self.budgets, self.machine, self.tuning, count, plan)

    def scaled(self, factor: float) -> ForecastCase:
        """Return the same case with all computing taking `factor` times as long."""
        samples = tuple(replace(s, work=s.work.scaled(factor)) for s in self.samples)
        return replace(self, work=self.work.scaled(factor), samples=samples)

    # --- bytes ------------------------------------------------------------------------------------

    @property
    def plain_bytes(self) -> int:
        """The bytes that torch alone would need in one place: for everything, with the same
        precision.
        """
        found = self.footprint
        kept = found.activation_bytes + found.logits_bytes + found.buffer_bytes
        return self.footprint.param_bytes + self._grad_bytes + self.facts.state_bytes + kept

    @property
    def _grad_bytes(self) -> int:
        return sum(param.grad_bytes for param in self.work.params)

    @property
    def room_bytes(self) -> int:
        """The bytes that plain torch could have in the place where the model runs."""
        if self.footprint.on_device:
            return self.budgets.device_bytes or 0
        return self.budgets.host_bytes or self._memory_bytes or 0

    @property
    def _memory_bytes(self) -> int | None:
        return self.known.memory_bytes if self.known is not None else None

    @cached_property
    def least(self) -> dict[str, int]:
        """The smallest budgets that work."""
        found = {
            "host memory with a drive": self._least_host_bytes(directories=1),
            "host memory without one": self._least_host_bytes(directories=0),
        }
        if self.footprint.on_device:
            needed = sum(self.footprint.device_parts(self.request.use).values())
            found["device memory"] = smallest(lambda nbytes: needed <= nbytes, 2 * needed)
        return found

    def _least_host_bytes(self, directories: int) -> int:
        work, facts = self.work, self.facts

        def works(host_bytes: int) -> bool:
            budgets = replace(
                self.budgets,
                host_bytes=host_bytes,
                directories=directories,
                joined_numel=self.numel // _FEW_CHUNKS,
            )
            try:
                if facts.is_prepared:
                    share_out(facts, budgets)
                else:
                    plan_of(work, budgets)
            except CapacityError:
                return False
            return True

        whole = work.param_bytes + sum(facts.gradients) + facts.state_bytes + facts.staging_bytes
        return smallest(works, 2 * whole + PAGE * (len(work.units) + len(work.params) + 4))

    def tiers(self, plan: TrainingPlan) -> dict[str, dict[str, int]]:
        shares, footprint = plan.shares, self.footprint
        where = "device" if footprint.on_device else "process"
        here = footprint.activations_here_bytes
        elsewhere = footprint.activation_bytes - here
        if footprint.activations == "offload":  # beyond their share of host memory: on the drives
            elsewhere += here if not footprint.on_device else 0
            here = here if footprint.on_device else 0
        in_share = min(elsewhere, shares.activations)
        tiers = plan.tiers
        if self.request.use == WRAP:  # they stay where they are
            tiers["parameters"] = {where: footprint.param_bytes}
            tiers["gradients"] = {where: self._grad_bytes}
        else:  # what they take, without the buffers that they pass through
            tiers["gradients"]["host"] = sum(plan.facts.gradients) - shares.gradients_on_disk
        return tiers | {
            "activations": {where: here, "host": in_share, "disk": elsewhere - in_share},
            "logits": {where: footprint.logits_bytes},
        }

    def problems(self, plan: TrainingPlan) -> tuple[str, ...]:
        """Return the problems that the engine itself would not notice, since it counts its own
        bytes only, or that only the real machine would tell.
        """
        return (*self._host_problems(plan.host_bytes), *self._place_problems(plan))

    def _host_problems(self, taken_bytes: int) -> Iterator[str]:
        """Activations and logits may need more host memory than the machine has."""
        total = self._memory_bytes
        beside = 0 if self.footprint.on_device else self.footprint.passing_bytes
        if self.request.use == WRAP and not self.footprint.on_device:
            beside += self.footprint.param_bytes + self._grad_bytes
        if total is not None and taken_bytes + beside > total:
            also = f" and {format_size(beside)} beside them, of the model," if beside else ""
            yield (
                f"the machine has {format_size(total)}: {format_size(taken_bytes)} that are "
                f"taken{also} are more; lower host_memory"
                + (', take a smaller batch, or activations="recompute"' if beside else "")
            )

    def _place_problems(self, plan: TrainingPlan) -> Iterator[str]:
        """The budget may be more than the device has, and the directories may have less room."""
        device = self.known.device_memory_bytes if self.known is not None else None
        allowed, room = self.budgets.device_bytes, self.request.drive_bytes
        if device is not None and allowed is not None and allowed > device:
            yield (
                f"the device has {format_size(device)}: device_memory={format_size(allowed)} is "
                "more; lower it"
            )
        if room is not None and plan.disk_room_bytes > room:
            yield (
                f"nvme: {format_size(room)} are free there, {format_size(plan.disk_room_bytes)} "
                "are needed; make room, add a directory on another drive, or raise host_memory"
            )

    # --- drives -----------------------------------------------------------------------------------

    def saving(self, plan: TrainingPlan) -> CheckpointCost:
        """Compute the cost of the checkpoints: parameters in their own dtypes, all optimizer state
        in fp32, and the model's buffers. All of a checkpoint is written; its part on the drives
        must be read for that, from the same drives.
        """
        steps, every, machine = self.request.steps, self.request.save_every, self.machine
        fields = sum(param.numel * len(param.fields) for param in self.work.params)
        written = self.footprint.param_bytes + 4 * fields + self.footprint.buffer_bytes
        read = plan.state.disk_bytes + plan.away_bytes
        mixed, write, each_s = machine.disk_mixed_bytes_per_s, machine.disk_write_bytes_per_s, None
        if self.known is not None and mixed and write:
            each_s = max(written / write, (read + written) / mixed if read else 0.0)
        return CheckpointCost(steps // every if every else 0, written, each_s)

    def wear(self, outcome: Outcome, saving: CheckpointCost) -> Wear:
        """Compute the wear of the drives, rated as common ones are if the request does not tell."""
        steps, drives = self.request.steps, max(1, self.budgets.directories)
        moved = steps * outcome.written_bytes + saving.count * saving.each_bytes
        rated = self.request.endurance_tb or RATED_TERABYTES_WRITTEN
        written_tb, whole_tb = moved / 1e12, rated * drives
        is_timed = self.known is not None and written_tb
        life_s = steps * outcome.step_s * whole_tb / written_tb if is_timed else None
        share = written_tb / whole_tb
        return Wear(written_tb, rated, self.request.endurance_tb is None, share, life_s)

    # --- time -------------------------------------------------------------------------------------

    def timing(self, outcome: Outcome) -> Timing:
        return Timing(
            **{field.name: getattr(outcome, field.name) for field in fields(StepTime)},
            tokens_per_s=self.work.tokens / outcome.step_s if outcome.step_s else 0.0,
            training_s=self.request.steps * outcome.step_s,
            hidden_tokens=self._hidden_tokens(outcome),
            gains={},
        )

    def _hidden_tokens(self, outcome: Outcome) -> int | None:
        """Find the number of tokens from which on a step waits for the drives less than a tenth of
        its time. The waits in `step()` stay the same; those in the passes last until the passes
        compute as long as the drives need. The number is derived from that, then checked by a
        simulation and corrected by its result. None: there is no computing or no traffic of drives,
        or it would take more than `_MOST_FACTOR` times the tokens.
        """
        if not outcome.compute_s or not outcome.disk_busy_s:
            return None
        in_step = sum(s for name, s in outcome.stalls.items() if name.startswith(STEP))
        in_model = sum(s for name, s in outcome.stalls.items() if name.startswith(MODEL))
        waited_s = in_step * (1 / HIDDEN_SHARE - 1) - outcome.update_s
        factor = max(
            waited_s / outcome.compute_s, 1 + in_model / outcome.compute_s if in_model else 0.0
        )
        factor = max(factor, 1 / self.work.tokens)
        for _ in range(2 if self.numel < _LARGE_NUMEL else 1):
            if factor > _MOST_FACTOR:
                return None
            scaled = self.scaled(factor).run()
            if scaled.stalled_s <= HIDDEN_SHARE * scaled.step_s:
                break
            factor *= scaled.stalled_s / (HIDDEN_SHARE * scaled.step_s)
        return max(1, round(self.work.tokens * factor))

    def gains(self, step_s: float, uses_disk: bool) -> dict[str, float]:
        """Compute the seconds by which one more of each resource shortens a step."""
        budgets, found = self.budgets, dict[str, float]()

        def gain(within: Budgets, machine: Profile = self.machine) -> float:
            other = replace(self, budgets=within, machine=machine)
            return max(0.0, step_s - other.run().step_s)

        if budgets.host_bytes is not None:
            more = replace(budgets, host_bytes=budgets.host_bytes + _GB)
            found["1 GB more host memory"] = gain(more) if uses_disk else 0.0
        if budgets.device_bytes is not None:
            more = replace(budgets, device_bytes=budgets.device_bytes + _GB)
            found["1 GB more device memory"] = gain(more)
        if budgets.directories and uses_disk:
            more = replace(budgets, directories=budgets.directories + 1)
            found["one more drive"] = gain(more, with_drives(self.machine, more.directories))
        return found


def smallest(works: Callable[[int], bool], most: int) -> int:
    """Find the least number of bytes that works, to a thousandth and in whole pages, provided that
    all larger numbers work. most: a number that works.
    """
    low, high = 0, most
    while high - low > max(PAGE, int(high * _EXACT)):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return round_up(high, PAGE)
