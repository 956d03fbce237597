"""The replay of a recorded run on another machine, to find the settings that it needs there.

The order of units and their computing times come from the file; the times are scaled by how fast
the two machines multiply matrices. The engine's own decisions are made again, in virtual time. Some
depths, budgets and numbers of drives are tried, and the least that is about as good as the best is
recommended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError
from offload.core.strict_json import printable
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuning
from offload.telemetry import run_file, words
from offload.telemetry.run_file import About, Run
from offload.tools.forecast.forecast import show_seconds
from offload.tools.forecast.machines import (
    TargetMachine,
    find_machine,
    flops_of,
    usual_budgets,
    with_drives,
)
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.simulator import Outcome, simulate
from offload.tools.forecast.workload import Workload
from offload.tools.output import table

FORMAT = "offload replay"
VERSION = 1
_DEPTHS = (1, 2, 4, 8, 16)
_PARTS = (2, 4, 8)  # the budget for host memory is divided by these
_AS_GOOD = 1.02  # times the best step: a step that is about as good


@dataclass(frozen=True)
class ReplayTrial:
    """A trial of one setting. depth: the prefetch depth. step_s: None if the trial cannot work."""

    host_bytes: int | None
    drives: int
    depth: int
    step_s: float | None


@dataclass(frozen=True)
class Replay:
    """A replay of a run, with its trials and the recommended one. `str()` is a table.

    factor: by which computing takes longer on this machine than recorded. recorded_step_s: the
    median iteration, as the report has it; None: the file does not tell. outcome: with the
    recommended settings.
    """

    title: str
    recorded_on: str
    recorded_step_s: float | None
    machine: str
    machine_note: str
    factor: float
    notes: tuple[str, ...]
    device_bytes: int | None
    trials: tuple[ReplayTrial, ...]
    recommended: ReplayTrial
    outcome: Outcome

    @property
    def works(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def __str__(self) -> str:
        lines = [line.rstrip() for line in table(list(self._rows()), width=None)]
        return "\n".join([*lines, "", *self._table()])

    def _rows(self) -> Iterator[tuple[str, str]]:
        outcome, best = self.outcome, self.recommended
        before = self.recorded_step_s
        told = "" if before is None else f", {words.show_seconds(before)} an iteration (median)"
        yield "run", f"{self.title}, recorded on {self.recorded_on}{told}"
        yield "machine", f"{self.machine} ({self.machine_note})"
        yield "computing", f"{self.factor:.3g} times as long as recorded"
        for note in self.notes:
            yield "  note", note
        if self.device_bytes is not None:
            yield "device memory", format_size(self.device_bytes)
        yield (
            "recommended",
            f"prefetch_depth={best.depth}, {self._host(best.host_bytes)}, "
            f"{best.drives} drive{'s' * (best.drives != 1)}",
        )
        yield "a step takes", show_seconds(outcome.step_s)
        yield "  of that", outcome.large_parts(show_seconds)
        yield "limited by", f"{outcome.limit}: {show_seconds(outcome.limit_s)} at the very least"
        read, written = format_size(outcome.read_bytes), format_size(outcome.written_bytes)
        yield "moved each step", f"disk {read} read, {written} written"

    def _host(self, host_bytes: int | None) -> str:
        """Format a budget, and the bytes that are taken of it if they are fewer."""
        taken_bytes, text = self.outcome.host_bytes_taken, f"host memory {_size(host_bytes)}"
        if host_bytes is None or taken_bytes >= host_bytes:
            return text
        return f"{text} ({_size(taken_bytes)} of it are taken)"

    def _table(self) -> Iterator[str]:
        yield f"{'host memory':>14} {'drives':>7} {'depth':>6} {'a step':>10}"
        for trial in self.trials:
            taken = "too little" if trial.step_s is None else show_seconds(trial.step_s)
            mark = "  <- recommended" if trial == self.recommended else ""
            host = _size(trial.host_bytes)
            yield f"{host:>14} {trial.drives:>7} {trial.depth:>6} {taken:>10}{mark}"


def replay(
    trace: str | os.PathLike[str],
    on: str | None = None,
    recorded_on: str | None = None,
    budgets: ForecastRequest | None = None,
) -> Replay:
    """Replay a recorded run on a machine, and recommend settings for it.

    trace: a file that `save_trace` wrote. on, recorded_on: profiles; None: this machine's own.
    budgets: of this request only the budgets count; one that is not given is that of the run, or of
    the other machine. Raises `ConfigError` if speeds are not known, `CapacityError` if the run does
    not work within the whole budgets.
    """
    if not Path(trace).exists():
        raise ConfigError(
            f"trace: {printable(trace)} is not there; offload.report(...).save_trace writes one"
        )
    run = run_file.load(trace)
    machine = find_machine(on)
    if machine.profile is None:
        raise ConfigError(f"on: {machine.note}")
    origin = _origin(run.about, recorded_on)
    beside = (origin.compute_beside_disk if origin is not None else None) or 1.0
    work = Workload.of_run(run, beside)
    factor, notes = _factor(run.about, work, origin, machine.profile)
    about = run.about
    usual = usual_budgets(machine.profile, about.activations)
    if on is None or (origin is not None and origin.name == machine.name):
        known = about.host_bytes, about.device_bytes, about.directories
        usual = Budgets(*known, about.activations)
    wanted = (budgets or ForecastRequest("")).within(usual)
    if work.units:
        work = replace(work, device="cpu" if wanted.device_bytes is None else "device")
    if wanted.device_bytes is not None:
        notes.append("a trace does not tell what activations take: leave device memory for them")
    return _tried(run, work.scaled(factor), wanted, machine, factor, tuple(notes))


def _origin(about: About, text: str | None) -> Profile | None:
    """Find the profile of the machine that the run was recorded on; None: there is none."""
    found = find_machine(text).profile
    if text is None and found is not None and (found.cpu, found.cores) != (about.cpu, about.cores):
        return None
    return found


def _factor(
    about: About, work: Workload, origin: Profile | None, machine: Profile
) -> tuple[float, list[str]]:
    before = flops_of(origin, work.dtype) if origin is not None else None
    after = flops_of(machine, work.dtype)
    if before is None:
        return 1.0, [
            f"computing is left as recorded: how fast {about.cpu} multiplies is not known; "
            "--from names its profile"
        ]
    if after is None:
        return 1.0, [f"computing is left as recorded: {machine.name} does not tell its FLOP/s"]
    return before / after, []


# --- trying ---------------------------------------------------------------------------------------


def _tried(
    run: Run,
    work: Workload,
    budgets: Budgets,
    machine: TargetMachine,
    factor: float,
    notes: tuple[str, ...],
) -> Replay:
    outcomes: dict[ReplayTrial, Outcome] = {}

    def run_within(within: Budgets, depth: int) -> ReplayTrial:
        """Simulate a setting and return its trial, without `step_s` if it cannot work. Raises
        `CapacityError` if it cannot work within the whole budgets.
        """
        assert machine.profile is not None
        trial = ReplayTrial(within.host_bytes, within.directories, depth, None)
        profile = with_drives(machine.profile, within.directories)
        try:
            outcome = simulate(work, within, profile, Tuning(prefetch_depth=depth))
        except CapacityError:
            if within == budgets:
                raise
            return trial
        trial = replace(trial, step_s=outcome.step_s)
        outcomes[trial] = outcome
        return trial

    depths = [run_within(budgets, depth) for depth in _DEPTHS] if work.units else []
    depth = _least_of(depths).depth if depths else 0
    others = [run_within(fewer, depth) for fewer in _fewer(budgets)]
    first = depths or [run_within(budgets, 0)]
    trials = tuple(dict.fromkeys([*first, *others]))
    chosen, recorded = _least_of(trials), run.iterations
    return Replay(
        title=run.about.title,
        recorded_on=f"{run.about.cpu}, {run.about.cores} cores",
        recorded_step_s=recorded.typical_s if recorded.is_whole else None,
        machine=machine.name,
        machine_note=machine.note,
        factor=factor,
        notes=notes,
        device_bytes=budgets.device_bytes,
        trials=trials,
        recommended=chosen,
        outcome=outcomes[chosen],
    )


def _fewer(budgets: Budgets) -> Iterator[Budgets]:
    if budgets.host_bytes is not None:
        yield from (replace(budgets, host_bytes=budgets.host_bytes // part) for part in _PARTS)
    yield from (replace(budgets, directories=n) for n in range(1, budgets.directories))


def _least_of(trials: Sequence[ReplayTrial]) -> ReplayTrial:
    """Return, among the trials about as good as the best, the one with the least memory, the fewest
    drives, the least depth, in this order.
    """
    best_s = min(trial.step_s for trial in trials if trial.step_s is not None)
    good = [t for t in trials if t.step_s is not None and t.step_s <= _AS_GOOD * best_s]
    return min(good, key=lambda t: (t.host_bytes or 0, t.drives, t.depth))


def _size(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else format_size(nbytes)
