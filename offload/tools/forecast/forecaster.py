"""The forecaster: it counts the model on shapes alone, plans as the engine does, and runs the
engine in virtual time. It allocates nothing and opens no directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from offload.tools.forecast.simulator import Outcome, facts_of, plan_of, simulate_plan
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
    """A case to simulate. machine: with as many drives as the request asks for."""

    footprint: Footprint
    work: Workload
    budgets: Budgets
    machine: Profile
    tuning: Tuning

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.work.params)

    @property
    def facts(self) -> TrainingFacts:
        return facts_of(self.work, self.budgets.offloads_activations)

    def run(self, plan: TrainingPlan | None = None) -> Outcome:
        count = _ITERATIONS if self.numel < _LARGE_NUMEL else _FEWER_ITERATIONS
        plan = plan or plan_of(self.work, self.budgets)
        return simulate_plan(self.work, plan, self.machine, self.tuning, count)

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of one checkpoint: parameters in their own dtypes, all optimizer state in fp32,
        and the model's buffers.
        """
        fields = sum(param.numel * len(param.fields) for param in self.work.params)
        return self.footprint.param_bytes + 4 * fields + self.footprint.buffer_bytes

    @property
    def plain_bytes(self) -> int:
        """The bytes that torch alone would need in one place: for everything, with the same
        precision.
        """
        found, facts = self.footprint, self.facts
        kept = found.activation_bytes + found.logits_bytes + found.buffer_bytes
        return self.work.param_bytes + sum(facts.gradients) + facts.state_bytes + kept

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
    case = _ForecastCase(footprint, work, budgets, profile, tuning)
    missing = missing_speeds(known, footprint.dtype, budgets.directories, on_device)
    if machine.profile is not None and missing:
        note = (
            f"{machine.name} has no speed of {' and '.join(missing)}; `offload bench DIRECTORY "
            f"--only {','.join(missing)}` measures it and keeps the rest"
        )
        machine = replace(machine, profile=None, note=note)
    return _answer(request, machine, case, tuned, tell)


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


# --- the answer -----------------------------------------------------------------------------------


def _answer(
    request: ForecastRequest,
    machine: TargetMachine,
    case: _ForecastCase,
    tuned: Tuned | None,
    tell: Tell,
) -> Forecast:
    footprint, budgets = case.footprint, case.budgets
    tell("simulating a step")
    plan, outcome = _try(case, request.host_bytes is not None)
    saving = _saving(request, case, machine.profile, plan)
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
        tiers=_tiers(case, plan),
        taken_bytes=outcome.host_bytes_taken,
        passing_bytes=footprint.passing_bytes,
        disk_room_bytes=outcome.disk_bytes,
        read_bytes=outcome.read_bytes,
        written_bytes=outcome.written_bytes,
        spilled_bytes=outcome.spilled_bytes,
        to_device_bytes=outcome.to_device_bytes,
        to_host_bytes=outcome.to_host_bytes,
        wear=_wear(request, outcome.written_bytes, saving, budgets.directories),
        saving=saving,
        least=case.least,
        plain_bytes=case.plain_bytes,
        fits_without_us=case.plain_bytes <= _room_bytes(case, machine.profile),
        notes=tuple(filter(None, (footprint.recompute_note,))),
        problems=_problems(case, machine.profile, outcome),
        tuned=None if tuned is None else f"{tuned.tuning}; found {tuned.date}",
        timing=_timing(request, case, outcome, tell) if machine.profile is not None else None,
    )


def _try(case: _ForecastCase, host_is_given: bool) -> tuple[TrainingPlan, Outcome]:
    """Plan the case and simulate it. A refusal also says which budgets would work."""
    try:
        if case.budgets.device_bytes is not None:
            case.footprint.check_device(case.budgets.device_bytes)
        plan = plan_of(case.work, case.budgets)
        return plan, case.run(plan)
    except CapacityError as error:
        least = ", ".join(f"{name} {format_size(n)}" for name, n in case.least.items())
        origin = "" if host_is_given else _ORIGIN
        raise CapacityError(f"{error}; smallest budgets that work: {least}{origin}") from error


def _tiers(case: _ForecastCase, plan: TrainingPlan) -> dict[str, dict[str, int]]:
    shares, footprint = plan.shares, case.footprint
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


def _room_bytes(case: _ForecastCase, machine: Profile | None) -> int:
    """Return the bytes that plain torch could have in the place where the model runs."""
    if case.footprint.on_device:
        return case.budgets.device_bytes or 0
    total = machine.memory_bytes if machine is not None else None
    return case.budgets.host_bytes or total or 0


def _problems(case: _ForecastCase, machine: Profile | None, outcome: Outcome) -> tuple[str, ...]:
    """Return the problems that the engine itself would not notice, since it counts its own bytes
    only: activations and logits may need more host memory than the machine has.
    """
    total = machine.memory_bytes if machine is not None else None
    beside = 0 if case.footprint.on_device else case.footprint.passing_bytes
    needed = outcome.host_bytes_taken + beside
    if total is None or needed <= total:
        return ()
    return (
        f"the machine has {format_size(total)}: {format_size(outcome.host_bytes_taken)} that are "
        f"taken and {format_size(beside)} of activations and logits beside them are more; lower "
        'host_memory, take a smaller batch, or activations="recompute"',
    )


# --- drives ---------------------------------------------------------------------------------------


def _saving(
    request: ForecastRequest, case: _ForecastCase, machine: Profile | None, plan: TrainingPlan
) -> CheckpointCost:
    """Compute the cost of the checkpoints. All of a checkpoint is written; its part on the drives
    must be read for that, from the same drives.
    """
    count = request.steps // request.save_every if request.save_every else 0
    written = case.checkpoint_bytes
    read = plan.state.disk_bytes + plan.param_bytes - plan.params_on_host_bytes
    mixed, write = case.machine.disk_mixed_bytes_per_s, case.machine.disk_write_bytes_per_s
    if machine is None or not mixed or not write:
        return CheckpointCost(count, written, None)
    return CheckpointCost(
        count, written, max(written / write, (read + written) / mixed if read else 0.0)
    )


def _wear(
    request: ForecastRequest, written_bytes: int, saving: CheckpointCost, drives: int
) -> Wear:
    written_tb = (request.steps * written_bytes + saving.count * saving.each_bytes) / 1e12
    rated = request.endurance_tb
    share = written_tb / (rated * max(1, drives)) if rated is not None else None
    return Wear(written_tb, rated, share)


# --- time -----------------------------------------------------------------------------------------


def _timing(request: ForecastRequest, case: _ForecastCase, outcome: Outcome, tell: Tell) -> Timing:
    tell("simulating a step with more of each")
    return Timing(
        step_s=outcome.step_s,
        compute_s=outcome.compute_s,
        update_s=outcome.update_s,
        other_s=max(0.0, outcome.other_s),
        stalls=outcome.stalls,
        tokens_per_s=case.footprint.tokens / outcome.step_s if outcome.step_s else 0.0,
        training_s=request.steps * outcome.step_s,
        limit=outcome.limit,
        limit_s=outcome.limit_s,
        depth=outcome.depth,
        hidden_tokens=_hidden_tokens(case, outcome),
        gains=_gains(case, outcome),
    )


def _hidden_tokens(case: _ForecastCase, outcome: Outcome) -> int | None:
    """Find the number of tokens from which on a step waits for the drives less than a tenth of its
    time. The waits in `step()` stay the same; those in the passes last until the passes compute as
    long as the drives need. The number is derived from that, then checked by a simulation and
    corrected by its result. None: there is no computing or no traffic of drives, or it would take
    more than `_MOST_FACTOR` times the tokens.
    """
    if not outcome.compute_s or not outcome.disk_busy_s:
        return None
    in_step = sum(s for name, s in outcome.stalls.items() if name.startswith(STEP))
    in_model = sum(s for name, s in outcome.stalls.items() if name.startswith(MODEL))
    waited_s = in_step * (1 / HIDDEN_SHARE - 1) - outcome.update_s
    factor = max(
        waited_s / outcome.compute_s, 1 + in_model / outcome.compute_s if in_model else 0.0
    )
    factor = max(factor, 1 / case.work.tokens)
    for _ in range(2 if case.numel < _LARGE_NUMEL else 1):
        if factor > _MOST_FACTOR:
            return None
        scaled = replace(case, work=case.work.scaled(factor)).run()
        if scaled.stalled_s <= HIDDEN_SHARE * scaled.step_s:
            return max(1, round(case.work.tokens * factor))
        factor *= scaled.stalled_s / (HIDDEN_SHARE * scaled.step_s)
    return max(1, round(case.work.tokens * factor))


def _gains(case: _ForecastCase, outcome: Outcome) -> dict[str, float]:
    """Compute the seconds by which one more of each resource shortens a step."""
    budgets, found = case.budgets, {}
    uses_disk = outcome.read_bytes or outcome.written_bytes

    def gain(machine: Profile, **more: int) -> float:
        other = replace(case, budgets=replace(budgets, **more), machine=machine)  # type: ignore[arg-type]
        return max(0.0, outcome.step_s - other.run().step_s)

    if budgets.host_bytes is not None:
        nbytes = budgets.host_bytes + _GB
        found["1 GB more host memory"] = gain(case.machine, host_bytes=nbytes) if uses_disk else 0.0
    if budgets.device_bytes is not None:
        nbytes = budgets.device_bytes + _GB
        found["1 GB more device memory"] = gain(case.machine, device_bytes=nbytes)
    if budgets.directories and uses_disk:
        count = budgets.directories + 1
        found["one more drive"] = gain(with_drives(case.machine, count), directories=count)
    return found
