"""The forecaster: it counts the model on shapes alone, plans as the engine does, and runs the
engine in virtual time. It allocates nothing and opens no directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from offload.core.config import Config, format_size
from offload.core.errors import CapacityError
from offload.planning.layout import round_up
from offload.planning.limits import host_bytes as usual_bytes_here
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.profile import Profile, Tuned, Tuning, TuningTarget
from offload.planning.shares import share_out
from offload.planning.training import TrainingPlan
from offload.planning.tuning import UNTUNED, fingerprint_of
from offload.planning.unit import PAGE
from offload.tools.forecast.footprint import Footprint, measure
from offload.tools.forecast.forecast import (
    HIDDEN_SHARE,
    CheckpointCost,
    Forecast,
    ForecastRequest,
    StepTime,
    Timing,
    Wear,
)
from offload.tools.forecast.machines import (
    NOMINAL,
    TargetMachine,
    completed,
    find_machine,
    missing_speeds,
    usual_budgets,
    with_drives,
)
from offload.tools.forecast.model_source import find_source
from offload.tools.forecast.simulation.training import MODEL, STEP
from offload.tools.forecast.simulator import Outcome, facts_of, plan_of, simulate
from offload.tools.forecast.workload import Workload

_GB = 10**9
_EXACT = 1e-3  # of the smallest budget: the search ends within this share
_ITERATIONS = 4  # two of them steady: which chunks stay in buffers differs from step to step
_FEWER_ITERATIONS = 3  # for a model so large that its buffers hardly matter
_LARGE_NUMEL = 2 * 10**9
_ORIGIN = (
    " (host_memory was not given: then it is what the machine has, less 20 % and at least 8 GiB, "
    "but no more than 40 %; or what is free of that on a machine whose profile is not known)"
)
_MOST_FACTOR = 1e6  # times as many tokens


Tell = Callable[[str], None]


@dataclass(frozen=True)
class _ForecastCase:
    """A case to simulate. machine: with as many drives as the request asks for, and with a nominal
    value for every speed that is not known. known: what is known of it; None: speeds are missing.
    """

    request: ForecastRequest
    footprint: Footprint
    work: Workload
    budgets: Budgets
    machine: Profile
    known: Profile | None
    tuning: Tuning

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.work.params)

    @property
    def facts(self) -> TrainingFacts:
        return facts_of(self.work, self.budgets.offloads_activations)

    def run(self, plan: TrainingPlan | None = None) -> Outcome:
        count = _ITERATIONS if self.numel < _LARGE_NUMEL else _FEWER_ITERATIONS
        return simulate(self.work, self.budgets, self.machine, self.tuning, count, plan)

    def run_first(self) -> tuple[TrainingPlan, Outcome]:
        """Plan the case and simulate it. A refusal also says which budgets would work."""
        try:
            if self.budgets.device_bytes is not None:
                self.footprint.check_device(self.budgets.device_bytes)
            plan = plan_of(self.work, self.budgets)
            return plan, self.run(plan)
        except CapacityError as error:
            least = ", ".join(f"{name} {format_size(n)}" for name, n in self.least.items())
            origin = _ORIGIN if self.request.host_bytes is None else ""
            raise CapacityError(f"{error}; smallest budgets that work: {least}{origin}") from error

    # --- bytes ------------------------------------------------------------------------------------

    @property
    def plain_bytes(self) -> int:
        """The bytes that torch alone would need in one place: for everything, with the same
        precision.
        """
        found, facts = self.footprint, self.facts
        kept = found.activation_bytes + found.logits_bytes + found.buffer_bytes
        return self.work.param_bytes + sum(facts.gradients) + facts.state_bytes + kept

    @property
    def room_bytes(self) -> int:
        """The bytes that plain torch could have in the place where the model runs."""
        if self.footprint.on_device:
            return self.budgets.device_bytes or 0
        return self.budgets.host_bytes or self._memory_bytes or 0

    @property
    def _memory_bytes(self) -> int | None:
        return self.known.memory_bytes if self.known is not None else None

    @property
    def least(self) -> dict[str, int]:
        """The smallest budgets that work."""
        found = {
            "host memory with a drive": self._least_host_bytes(directories=1),
            "host memory without one": self._least_host_bytes(directories=0),
        }
        if self.footprint.on_device:
            needed = sum(self.footprint.device_parts.values())
            found["device memory"] = smallest(lambda nbytes: needed <= nbytes, 2 * needed)
        return found

    def _least_host_bytes(self, directories: int) -> int:
        work, facts = self.work, self.facts

        def works(host_bytes: int) -> bool:
            budgets = replace(self.budgets, host_bytes=host_bytes, directories=directories)
            try:
                share_out(facts, budgets)
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
        # What they take, without the buffers that they pass through.
        tiers["gradients"]["host"] = sum(plan.facts.gradients) - shares.gradients_on_disk
        return tiers | {
            "activations": {where: here, "host": in_share, "disk": elsewhere - in_share},
            "logits": {where: footprint.logits_bytes},
        }

    def problems(self, taken_bytes: int) -> tuple[str, ...]:
        """Return the problems that the engine itself would not notice, since it counts its own
        bytes only: activations and logits may need more host memory than the machine has.
        """
        total = self._memory_bytes
        beside = 0 if self.footprint.on_device else self.footprint.passing_bytes
        if total is None or taken_bytes + beside <= total:
            return ()
        return (
            f"the machine has {format_size(total)}: {format_size(taken_bytes)} that are "
            f"taken and {format_size(beside)} of activations and logits beside them are more; "
            'lower host_memory, take a smaller batch, or activations="recompute"',
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

    def wear(self, written_bytes: int, saving: CheckpointCost) -> Wear:
        moved = self.request.steps * written_bytes + saving.count * saving.each_bytes
        written_tb, rated = moved / 1e12, self.request.endurance_tb
        share = written_tb / (rated * max(1, self.budgets.directories)) if rated else None
        return Wear(written_tb, rated, share)

    # --- time -------------------------------------------------------------------------------------

    def timing(self, outcome: Outcome) -> Timing:
        return Timing(
            **{field.name: getattr(outcome, field.name) for field in fields(StepTime)},
            tokens_per_s=self.work.tokens / outcome.step_s if outcome.step_s else 0.0,
            training_s=self.request.steps * outcome.step_s,
            hidden_tokens=self._hidden_tokens(outcome),
            gains=self._gains(outcome),
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
            scaled = replace(self, work=self.work.scaled(factor)).run()
            if scaled.stalled_s <= HIDDEN_SHARE * scaled.step_s:
                break
            factor *= scaled.stalled_s / (HIDDEN_SHARE * scaled.step_s)
        return max(1, round(self.work.tokens * factor))

    def _gains(self, outcome: Outcome) -> dict[str, float]:
        """Compute the seconds by which one more of each resource shortens a step."""
        budgets, found = self.budgets, dict[str, float]()
        uses_disk = outcome.read_bytes or outcome.written_bytes

        def gain(within: Budgets, machine: Profile = self.machine) -> float:
            other = replace(self, budgets=within, machine=machine)
            return max(0.0, outcome.step_s - other.run().step_s)

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


def forecast(request: ForecastRequest, tell: Tell = lambda text: None) -> Forecast:
    """Forecast the training that is requested. tell: called with a text that says what is done now.
    Raises `ConfigError` if the machine or the model cannot be found, or the model cannot run on
    shapes alone, and `CapacityError` with the arithmetic if the budgets cannot work.
    """
    machine = find_machine(request.on)
    source = find_source(request.model, request.shape)
    known = machine.profile or NOMINAL
    on_device = known.device is not None or request.device_bytes is not None
    if machine.profile is None:
        usual = Budgets(usual_bytes_here(Config())[0], activations=request.activations)
    else:
        usual = usual_budgets(machine.profile, request.activations)
        usual = replace(usual, directories=usual.directories or 1)
    budgets = request.within(usual)
    profile = with_drives(completed(known), budgets.directories)
    tell("counting what the model computes and keeps")

    def measured(unit_bytes: int | None) -> Footprint:
        size, dtype, how = (request.batch, request.sequence), request.dtype, request.activations
        return measure(source, *size, dtype, how, unit_bytes, on_device)

    footprint = measured(None)
    tuned = _tuned_for(footprint, profile, request, budgets.directories)
    tuning = UNTUNED if tuned is None else tuned.tuning
    if tuning.unit_bytes is not None:
        footprint = measured(tuning.unit_bytes)
    work = footprint.workload(request.optimizer, profile)
    budgets = replace(budgets, chunk_numel=tuning.chunk_numel)
    missing = missing_speeds(known, footprint.dtype, budgets.directories, on_device)
    if machine.profile is not None and missing:
        note = (
            f"{machine.name} has no speed of {' and '.join(missing)}; `offload bench DIRECTORY "
            f"--only {','.join(missing)}` measures it and keeps the rest"
        )
        machine = replace(machine, profile=None, note=note)
    case = _ForecastCase(request, footprint, work, budgets, profile, machine.profile, tuning)
    return _answer(case, machine, tuned, tell)


def _tuned_for(
    footprint: Footprint, machine: Profile, request: ForecastRequest, drives: int
) -> Tuned | None:
    """Return what `offload tune` has found on that machine for this very model, within the budgets
    of the request. A budget that was not given matches only one that was not given to the tuner.
    """
    target = TuningTarget(
        fingerprint_of(footprint.model.parameters()),
        "cpu" if not footprint.on_device else machine.device or "cuda",
        request.host_bytes,
        request.device_bytes,
        drives,
    )
    return machine.tuned_for(target)


def _answer(
    case: _ForecastCase, machine: TargetMachine, tuned: Tuned | None, tell: Tell
) -> Forecast:
    request, footprint, budgets = case.request, case.footprint, case.budgets
    tell("simulating a step")
    plan, outcome = case.run_first()
    saving = case.saving(plan)
    if case.known is not None:
        tell("simulating a step with more of each")
    return Forecast(
        model=footprint.name,
        machine=machine.name,
        machine_note=machine.note,
        numel=footprint.numel,
        trained_numel=case.numel,
        dtype=footprint.dtype,
        units=len(footprint.units),
        batch=request.batch,
        sequence=request.sequence,
        tokens=footprint.tokens,
        steps=request.steps,
        optimizer=request.optimizer,
        activations=request.activations,
        flops=float(footprint.flops),
        host_bytes=budgets.host_bytes,
        device_bytes=budgets.device_bytes,
        drives=budgets.directories,
        tiers=case.tiers(plan),
        taken_bytes=outcome.host_bytes_taken,
        passing_bytes=footprint.passing_bytes,
        disk_room_bytes=outcome.disk_bytes,
        read_bytes=outcome.read_bytes,
        written_bytes=outcome.written_bytes,
        spilled_bytes=outcome.spilled_bytes,
        to_device_bytes=outcome.to_device_bytes,
        to_host_bytes=outcome.to_host_bytes,
        wear=case.wear(outcome.written_bytes, saving),
        saving=saving,
        least=case.least,
        plain_bytes=case.plain_bytes,
        fits_without_us=case.plain_bytes <= case.room_bytes,
        notes=tuple(filter(None, (footprint.recompute_note,))),
        problems=case.problems(outcome.host_bytes_taken),
        tuned=None if tuned is None else f"{tuned.tuning}; found {tuned.date}",
        timing=case.timing(outcome) if case.known is not None else None,
    )
