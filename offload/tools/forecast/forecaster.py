"""The forecaster: it counts the model on shapes alone, plans as the engine does, and runs the
engine in virtual time. It allocates nothing and opens no directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.core.config import Config
from offload.core.errors import CapacityError
from offload.planning.limits import host_bytes as usual_bytes_here
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuned, TuningTarget
from offload.planning.tuning import UNTUNED, fingerprint_of
from offload.tools.forecast.advice import call_of, find_changes
from offload.tools.forecast.case import ForecastCase
from offload.tools.forecast.footprint import Footprint, measure
from offload.tools.forecast.forecast import (
    Change,
    Forecast,
    Misfit,
    MisfitError,
    show_budgets,
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
from offload.tools.forecast.request import WRAP, ForecastRequest
from offload.tools.forecast.sources import find_source

Tell = Callable[[str], None]
_UNCHECKED = (
    "the cost of every layer was counted: the model does not run, or not alike, with fewer of them"
)


@dataclass(frozen=True)
class _Setting:
    """A request with all that it names: the case to simulate, its machine, and what was tuned."""

    case: ForecastCase
    machine: TargetMachine
    tuned: Tuned | None


def forecast(
    request: ForecastRequest,
    tell: Tell = lambda text: None,
    show: Callable[[Forecast], None] = lambda found: None,
) -> Forecast:
    """Forecast the training that is requested. tell: called with a text that says what is done now.
    show: called with the forecast as soon as only the gains are missing. Raises `ConfigError` if
    the machine or the model cannot be found, or the model cannot run on shapes alone, and
    `MisfitError` with the arithmetic, and with single changes that help, if the budgets cannot
    work.
    """
    tell("counting what the model computes and keeps")
    setting = _set_up(request)
    case = setting.case
    tell("simulating a step")
    try:
        found = _answer(setting)
    except CapacityError as error:
        tell("looking for a change that fits")
        raise MisfitError(_misfit(setting, error)) from error
    if found.problems:
        tell("looking for a change that fits")
        found = replace(found, changes=_changes(setting))
    show(found)
    if found.timing is None:
        return found
    tell("simulating a step with more of each")
    gains = case.gains(found.timing.step_s, bool(found.read_bytes or found.written_bytes))
    return replace(found, timing=replace(found.timing, gains=gains))


def _set_up(request: ForecastRequest) -> _Setting:
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

    def measured(unit_bytes: int | None) -> Footprint:
        return measure(
            source,
            request.batch,
            request.sequence,
            request.dtype,
            request.activations,
            unit_bytes,
            on_device,
            request.full,
            request.lora,
        )

    footprint = measured(None)
    tuned = _tuned_for(footprint, profile, request, budgets.directories)
    tuning = UNTUNED if tuned is None else tuned.tuning
    if tuning.unit_bytes is not None:
        footprint = measured(tuning.unit_bytes)
    budgets = replace(budgets, chunk_numel=tuning.chunk_numel)
    missing = missing_speeds(known, footprint.dtype, budgets.directories, on_device)
    if machine.profile is not None and missing:
        note = (
            f"{machine.name} has no speed of {' and '.join(missing)}; `offload bench DIRECTORY "
            f"--only {','.join(missing)}` measures it and keeps the rest"
        )
        machine = replace(machine, profile=None, note=note)
    case = ForecastCase.of(request, footprint, budgets, profile, machine.profile, tuning)
    return _Setting(case, machine, tuned)


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


def _answer(setting: _Setting) -> Forecast:
    """Make the forecast, without the gains."""
    case, machine, tuned = setting.case, setting.machine, setting.tuned
    request, footprint, budgets = case.request, case.footprint, case.budgets
    plan = case.plan()
    outcome = case.run(plan)
    saving = case.saving(plan)
    return Forecast(
        model=footprint.name,
        machine=machine.name,
        machine_note=machine.note,
        numel=footprint.numel,
        trained_numel=case.numel,
        dtype=footprint.dtype,
        units=len(footprint.units),
        batch=request.batch,
        sequence=footprint.tokens // request.batch,
        item=footprint.item,
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
        wear=case.wear(outcome, saving),
        saving=saving,
        least=case.least,
        plain_bytes=case.plain_bytes,
        fits_without_us=case.plain_bytes <= case.room_bytes,
        notes=_notes(case),
        problems=case.problems(plan),
        use=request.use,
        lora=request.lora,
        call=call_of(request, budgets, footprint.on_device),
        tuned=None if tuned is None else f"{tuned.tuning}; found {tuned.date}",
        timing=case.timing(outcome) if case.known is not None else None,
    )


def _notes(case: ForecastCase) -> tuple[str, ...]:
    request, footprint = case.request, case.footprint
    notes = [footprint.recompute_note] if footprint.recompute_note else []
    if request.use == WRAP and request.activations == "recompute":
        notes.append("wrap leaves activations to you: checkpoint the layers in the model itself")
    if not request.full and footprint.count.is_irregular:
        notes.append(_UNCHECKED)
    return tuple(notes)


def _misfit(setting: _Setting, error: CapacityError) -> Misfit:
    case = setting.case
    found, budgets = case.footprint, case.budgets
    return Misfit(
        f"{found.name}: {found.numel:,} parameters, {found.dtype}",
        f"{setting.machine.name} ({setting.machine.note})",
        show_budgets(budgets.host_bytes, budgets.device_bytes, budgets.directories),
        str(error),
        _changes(setting),
    )


def _changes(setting: _Setting) -> tuple[Change, ...]:
    case = setting.case

    def step_of(request: ForecastRequest) -> tuple[float | None, float | None] | None:
        other = _set_up(request).case
        try:
            plan = other.plan()
            outcome = other.run(plan)
        except CapacityError:
            return None
        if other.problems(plan):
            return None
        if other.known is None:
            return None, None
        return outcome.step_s, other.work.tokens / outcome.step_s

    return find_changes(case, step_of)
