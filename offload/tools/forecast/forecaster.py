"""The forecaster: it counts the model on shapes alone, plans as the engine does, and runs the
engine in virtual time. It allocates nothing and opens no directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.core.config import Config, format_size
from offload.core.errors import CapacityError
from offload.planning.limits import host_bytes as usual_bytes_here
from offload.planning.profile import Profile, Tuned, Tuning
from offload.planning.tuning import UNTUNED, fingerprint_of
from offload.tools.forecast.footprint import measure
from offload.tools.forecast.forecast import HIDDEN_SHARE, CheckpointCost, Forecast, Timing, Wear
from offload.tools.forecast.forecast_request import ForecastRequest
from offload.tools.forecast.machines import (
    NOMINAL,
    TargetMachine,
    completed,
    find_machine,
    missing_speeds,
    usual_device_bytes,
    usual_host_bytes,
    with_drives,
)
from offload.tools.forecast.model_cost import ModelCost
from offload.tools.forecast.model_source import ModelSource, find_source
from offload.tools.forecast.simulation.arrangement import Arrangement, arrange
from offload.tools.forecast.simulator import MODEL, STEP, Outcome, simulate
from offload.tools.forecast.workload import Budgets, Workload

_GB = 10**9
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

    work: Workload
    budgets: Budgets
    machine: Profile
    tuning: Tuning

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.work.params)

    def run(self) -> Outcome:
        count = _ITERATIONS if self.numel < _LARGE_NUMEL else _FEWER_ITERATIONS
        return simulate(self.work, self.budgets, self.machine, self.tuning, count)

    def arrange(self) -> Arrangement:
        return arrange(self.work, self.budgets, self.tuning.chunk_numel)


def forecast(request: ForecastRequest, tell: Tell = lambda text: None) -> Forecast:
    """Forecast the training that is requested. tell: called with a text that says what is done now.
    Raises `ConfigError` if the machine or the model cannot be found, or the model cannot run on
    shapes alone, and `CapacityError` with the arithmetic if the budgets cannot work.
    """
    machine = find_machine(request.on)
    source = find_source(request.model, request.shape)
    known = machine.profile or NOMINAL
    drives = request.drives if request.drives is not None else len(known.disks) or 1
    profile = with_drives(completed(known), drives)
    on_device = profile.device is not None or request.device_bytes is not None
    budgets = Budgets(
        _host_bytes(request, machine),
        (request.device_bytes or usual_device_bytes(profile)) if on_device else None,
        drives,
        request.activations,
    )
    tell("counting what the model computes and keeps")
    model_cost = _drafted(request, source, on_device)
    tuned = _tuned_for(model_cost, profile, request, drives)
    if tuned is not None and tuned.tuning.unit_bytes is not None:
        model_cost = _drafted(request, source, on_device, tuned.tuning.unit_bytes)
    tuning = UNTUNED if tuned is None else tuned.tuning
    case = _ForecastCase(model_cost.workload(profile), budgets, profile, tuning)
    missing = missing_speeds(known, model_cost.footprint.dtype, drives, on_device)
    if machine.profile is not None and missing:
        machine = replace(machine, profile=None, note=_not_known(machine, missing))
    return _answer(request, machine, model_cost, case, tuned, tell)


def _not_known(machine: TargetMachine, missing: Sequence[str]) -> str:
    return (
        f"{machine.name} has no speed of {' and '.join(missing)}; `offload bench DIRECTORY --only "
        f"{','.join(missing)}` measures it and keeps the rest"
    )


def _drafted(
    request: ForecastRequest, source: ModelSource, on_device: bool, unit_bytes: int | None = None
) -> ModelCost:
    footprint = measure(
        source,
        request.batch,
        request.sequence,
        request.dtype,
        request.activations,
        unit_bytes,
        on_device,
    )
    return ModelCost.of(footprint, request.optimizer, on_device)


def _host_bytes(request: ForecastRequest, machine: TargetMachine) -> int | None:
    if request.host_bytes is not None:
        return request.host_bytes
    if machine.profile is not None:
        return usual_host_bytes(machine.profile)
    return usual_bytes_here(Config())[0]


def _tuned_for(
    model_cost: ModelCost, machine: Profile, request: ForecastRequest, drives: int
) -> Tuned | None:
    """Return what `offload tune` has found on that machine for this very model, within the budgets
    of the request. A budget that was not given matches only one that was not given to the tuner.
    """
    return machine.tuned_for(
        fingerprint_of(model_cost.footprint.model.parameters()),
        "cpu" if not model_cost.on_device else machine.device or "cuda",
        request.host_bytes,
        request.device_bytes,
        drives,
    )


# --- the answer -----------------------------------------------------------------------------------


def _answer(
    request: ForecastRequest,
    machine: TargetMachine,
    model_cost: ModelCost,
    case: _ForecastCase,
    tuned: Tuned | None,
    tell: Tell,
) -> Forecast:
    footprint, budgets = model_cost.footprint, case.budgets
    tell("simulating a step")
    arrangement, outcome = _try(model_cost, case, request.host_bytes is not None)
    saving = _saving(request, model_cost, case, machine.profile, arrangement)
    return Forecast(
        model=footprint.name,
        machine=machine.name,
        machine_note=machine.note,
        numel=footprint.numel,
        trained_numel=sum(spec.numel for spec in model_cost.specs if spec.fields),
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
        tiers=_tiers(model_cost, arrangement),
        taken_bytes=outcome.host_bytes_taken,
        passing_bytes=model_cost.passing_bytes,
        disk_room_bytes=outcome.disk_bytes,
        read_bytes=outcome.read_bytes,
        written_bytes=outcome.written_bytes,
        spilled_bytes=outcome.spilled_bytes,
        to_device_bytes=outcome.to_device_bytes,
        to_host_bytes=outcome.to_host_bytes,
        wear=_wear(request, outcome.written_bytes, saving, budgets.directories),
        saving=saving,
        least=_least(model_cost),
        plain_bytes=model_cost.plain_bytes,
        fits_without_us=model_cost.plain_bytes <= _room_bytes(model_cost, case, machine.profile),
        notes=tuple(filter(None, (model_cost.recompute_note,))),
        problems=_problems(model_cost, case, machine.profile, outcome),
        tuned=None if tuned is None else f"{tuned.tuning}; found {tuned.date}",
        timing=_timing(request, model_cost, case, outcome, tell)
        if machine.profile is not None
        else None,
    )


def _try(
    model_cost: ModelCost, case: _ForecastCase, host_is_given: bool
) -> tuple[Arrangement, Outcome]:
    """Plan the case and simulate it. A refusal also says which budgets would work."""
    try:
        if case.budgets.device_bytes is not None:
            model_cost.check_device(case.budgets.device_bytes)
        return case.arrange(), case.run()
    except CapacityError as error:
        least = ", ".join(f"{name} {format_size(n)}" for name, n in _least(model_cost).items())
        origin = "" if host_is_given else _ORIGIN
        raise CapacityError(f"{error}; smallest budgets that work: {least}{origin}") from error


def _least(model_cost: ModelCost) -> dict[str, int]:
    found = {
        "host memory with a drive": model_cost.least_host_bytes(has_disk=True),
        "host memory without one": model_cost.least_host_bytes(has_disk=False),
    }
    return found | (
        {"device memory": model_cost.least_device_bytes()} if model_cost.on_device else {}
    )


def _tiers(model_cost: ModelCost, arrangement: Arrangement) -> dict[str, dict[str, int]]:
    shares, state, footprint = arrangement.shares, arrangement.plan, model_cost.footprint
    assert shares is not None, "there are units"
    in_host = min(shares.params, model_cost.param_bytes)
    where = "device" if model_cost.on_device else "process"
    here = model_cost.activations_here_bytes
    elsewhere = footprint.activation_bytes - here
    if footprint.activations == "offload":  # beyond their share of host memory: on the drives
        elsewhere += here if not model_cost.on_device else 0
        here = here if model_cost.on_device else 0
    in_share = min(elsewhere, shares.activations)
    return {
        "parameters": {"host": in_host, "disk": model_cost.param_bytes - in_host},
        "gradients": {
            "host": model_cost.grad_bytes - shares.gradients_on_disk,
            "disk": shares.gradients_on_disk,
        },
        "optimizer state": {"host": state.resident_bytes, "disk": state.disk_bytes},
        "activations": {where: here, "host": in_share, "disk": elsewhere - in_share},
        "logits": {where: footprint.logits_bytes},
    }


def _room_bytes(model_cost: ModelCost, case: _ForecastCase, machine: Profile | None) -> int:
    """Return the bytes that plain torch could have in the place where the model runs."""
    if model_cost.on_device:
        return case.budgets.device_bytes or 0
    total = machine.memory_bytes if machine is not None else None
    return case.budgets.host_bytes or total or 0


def _problems(
    model_cost: ModelCost, case: _ForecastCase, machine: Profile | None, outcome: Outcome
) -> tuple[str, ...]:
    """Return the problems that the engine itself would not notice, since it counts its own bytes
    only: activations and logits may need more host memory than the machine has.
    """
    total = machine.memory_bytes if machine is not None else None
    beside = 0 if model_cost.on_device else model_cost.passing_bytes
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
    request: ForecastRequest,
    model_cost: ModelCost,
    case: _ForecastCase,
    machine: Profile | None,
    arrangement: Arrangement,
) -> CheckpointCost:
    """Compute the cost of the checkpoints. All of a checkpoint is written; its part on the drives
    must be read for that, from the same drives.
    """
    count = request.steps // request.save_every if request.save_every else 0
    written = model_cost.checkpoint_bytes
    read = arrangement.plan.disk_bytes + max(
        0, model_cost.param_bytes - arrangement.params_on_host_bytes
    )
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


def _timing(
    request: ForecastRequest,
    model_cost: ModelCost,
    case: _ForecastCase,
    outcome: Outcome,
    tell: Tell,
) -> Timing:
    tell("simulating a step with more of each")
    return Timing(
        step_s=outcome.step_s,
        compute_s=outcome.compute_s,
        update_s=outcome.update_s,
        other_s=max(0.0, outcome.other_s),
        stalls=outcome.stalls,
        tokens_per_s=model_cost.footprint.tokens / outcome.step_s if outcome.step_s else 0.0,
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
    if budgets.host_bytes is not None:
        more = replace(budgets, host_bytes=budgets.host_bytes + _GB)
        tried = replace(case, budgets=more)
        found["1 GB more host memory"] = _gain(outcome, tried.run) if uses_disk else 0.0
    if budgets.device_bytes is not None:
        more = replace(budgets, device_bytes=budgets.device_bytes + _GB)
        found["1 GB more device memory"] = _gain(outcome, replace(case, budgets=more).run)
    if budgets.directories and uses_disk:
        count = budgets.directories + 1
        more = replace(budgets, directories=count)
        tried = replace(case, budgets=more, machine=with_drives(case.machine, count))
        found["one more drive"] = _gain(outcome, tried.run)
    return found


def _gain(outcome: Outcome, run: Callable[[], Outcome]) -> float:
    return max(0.0, outcome.step_s - run().step_s)
