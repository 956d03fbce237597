"""A trial of `offload tune`, inside the process that trains.

The environment variable OFFLOAD_TRIAL names a file with the order: which tuning to run with, how
many steps to warm up and how many to measure, and where the result goes. `tuning.choose` takes the
order's tuning instead of any profile's, every step is noted here, and after the last one the result
is written and SystemExit(0) raised out of `optimizer.step()`. So the loop that is measured is the
user's own, unchanged.

The result is written anew at every step, whole or not: so the tuner learns how far a loop came that
ended early. The tuner reads these files without torch, so this module imports without it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offload.core.errors import ConfigError, FormatError, StoreError
from offload.core.portable import read_json, write_private
from offload.core.strict_json import read_as
from offload.core.timeline import (
    COMPUTING,
    DISK_READS,
    DISK_WRITES,
    IN_MODEL,
    IN_STEP,
    OTHER,
    Event,
    StepFact,
    busy_s,
)
from offload.planning.profile import Tuning, TuningTarget

if TYPE_CHECKING:  # they import torch, which the tuner does not need
    from offload.core.metrics import Metrics
    from offload.planning.unit import Unit

_T = TypeVar("_T")
ENVIRONMENT = "OFFLOAD_TRIAL"
MOST_FILE_BYTES = 1 << 20
_MEDIANS = ("stall_share", "compute_s", "update_s")
_MEDIAN_BYTES = ("read_bytes", "written_bytes", "to_device_bytes", "to_host_bytes")
_BEST = ("disk_bytes_per_s", "update_bytes_per_s")


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialOrder:
    """The order for a trial. warm_up: steps before the first that is measured, 1 at least: an
    iteration begins with the end of a step. result: the file for it.
    """

    tuning: Tuning
    warm_up: int
    steps: int
    result: str

    def __post_init__(self) -> None:
        if self.warm_up < 1 or self.steps < 1:
            raise FormatError(
                f"warm_up, steps: expected 1 or more of each, got {self.warm_up}, {self.steps}"
            )

    @property
    def steps_needed(self) -> int:
        return self.warm_up + self.steps

    def save(self, path: Path) -> None:
        write_private(path, json.dumps(asdict(self), allow_nan=False))


@dataclass(frozen=True)
class TrialResult:
    """The measurements of a trial. The seconds are of whole iterations, from the end of a step to
    that of the next; all else is the median iteration's. is_whole: no step is missing.

    targets: every model that was opened. tunes_depth, tunes_activations: the loop leaves these
    open. layer_bytes: of the most common size of unit; None: the model is not prepared.
    stall_share: of an iteration, in which its thread waited. disk_bytes_per_s, update_bytes_per_s:
    the best of any iteration. peak_bytes: of each kind of memory.
    """

    targets: tuple[TuningTarget, ...] = ()
    is_whole: bool = False
    steps_done: int = 0
    seconds: tuple[float, ...] = ()
    is_prepared: bool = False
    tunes_depth: bool = False
    tunes_activations: bool = False
    threads: int = 1
    layer_bytes: int | None = None
    layers: int = 0
    stall_share: float = 0.0
    compute_s: float = 0.0
    update_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    disk_bytes_per_s: float | None = None
    update_bytes_per_s: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def disk_bytes(self) -> int:
        """The bytes read and written in an iteration."""
        return self.read_bytes + self.written_bytes


def load_order(path: Path) -> TrialOrder:
    return _load(TrialOrder, path)


def load_result(path: Path) -> TrialResult | None:
    """Read the result; None: there is none, since nothing was prepared or wrapped."""
    return _load(TrialResult, path) if path.exists() else None


def _load(kind: type[_T], path: Path) -> _T:
    return read_json(path, MOST_FILE_BYTES, partial(read_as, kind))


# --- the trial of this process --------------------------------------------------------------------


class Trial:
    """The trial of this process. It follows the steps of the optimizer that steps first; those of a
    second one are part of the iteration. Only the thread that trains may call it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.order = load_order(path)
        self._result = TrialResult()
        self._followed: Metrics | None = None
        self._last: StepFact | None = None
        self._iterations: list[TrialResult] = []

    @property
    def tuning(self) -> Tuning:
        return self.order.tuning

    def note_target(self, target: TuningTarget) -> None:
        """Note that a model, or an optimizer's parameters, will be opened with that tuning."""
        targets = dict.fromkeys((*self._result.targets, target))
        self._write(targets=tuple(targets))

    def note_prepared(self, tunes_depth: bool, tunes_activations: bool) -> None:
        """Note that a model is opened, and whether it leaves these to the tuning."""
        known = self._result
        self._result = replace(
            known,
            is_prepared=True,
            tunes_depth=known.tunes_depth or tunes_depth,
            tunes_activations=known.tunes_activations or tunes_activations,
        )

    def note_step(self, step: StepFact, metrics: Metrics, model: object, threads: int) -> None:
        """Note that a step has ended. Raises SystemExit after the last step of the order. model:
        the prepared model that the step belongs to, if there is one.
        """
        if self._followed is not None and self._followed is not metrics:
            return
        self._followed = metrics
        steps = self._result.steps_done + 1
        if steps > self.order.warm_up and self._last is not None:
            events = metrics.events_since(self._last.end_s)
            self._iterations.append(_iteration(self._last, step, events))
        self._last = step
        layers = layer_sizes(getattr(model, "units", ()))
        usual = max(statistics.multimode(layers), default=None)
        is_last = steps >= self.order.steps_needed
        self._write(
            is_whole=is_last,
            steps_done=steps,
            threads=threads,
            layer_bytes=usual,
            layers=layers.count(usual or 0),
            peak_bytes=_peak_bytes(metrics),
            **_figures(self._iterations),
        )
        if is_last:
            raise SystemExit(0)

    def _write(self, **found: Any) -> None:
        self._result = replace(self._result, **found)
        result = json.dumps(asdict(self._result), allow_nan=False)
        write_private(Path(self.order.result), result)


_TRIALS: dict[str, Trial] = {}  # of this process: at most one, by the name of its file


def current() -> Trial | None:
    """Return the trial that this process runs; None: it runs none. Raises `ConfigError` where the
    order cannot be read.
    """
    name = os.environ.get(ENVIRONMENT)
    if not name:
        return None
    if name not in _TRIALS:
        try:
            _TRIALS[name] = Trial(Path(name))
        except (StoreError, FormatError) as error:
            raise ConfigError(
                f"{ENVIRONMENT}: {error}; `offload tune` sets it for its trials, unset it elsewhere"
            ) from error
    return _TRIALS[name]


# --- arithmetic -----------------------------------------------------------------------------------


def layer_sizes(units: Sequence[Unit]) -> list[int]:
    """Return the bytes that each layer's parameters take, its frozen ones included."""
    return [sum(units[n].nbytes for n in unit.needs) for unit in units if unit.modules]


def _iteration(before: StepFact, step: StepFact, events: Sequence[Event]) -> TrialResult:
    """Measure the iteration between the ends of two steps, as if the trial had no other."""
    in_step = {c.removeprefix(IN_STEP): s for c, s in step.seconds.items() if c.startswith(IN_STEP)}
    outside = {
        c.removeprefix(IN_MODEL): s for c, s in step.seconds.items() if c.startswith(IN_MODEL)
    }
    update_s = sum(s for cause, s in in_step.items() if cause in COMPUTING | {OTHER})
    model_waits_s = sum(s for cause, s in outside.items() if cause not in COMPUTING)
    whole_s = step.end_s - before.end_s
    waited_s = sum(in_step.values()) - update_s + model_waits_s
    found = TrialResult(
        seconds=(whole_s,),
        stall_share=min(1.0, waited_s / whole_s),
        compute_s=max(0.0, step.begin_s - before.end_s - model_waits_s),
        update_s=update_s,
        read_bytes=step.counts.get("disk_read_bytes", 0),
        written_bytes=step.counts.get("disk_written_bytes", 0),
        to_device_bytes=step.counts.get("host_to_device_bytes", 0),
        to_host_bytes=step.counts.get("device_to_host_bytes", 0),
    )
    disk_s = busy_s(event for event in events if event.row in (DISK_READS, DISK_WRITES))
    updated, updating_s = step.counts.get("updated_bytes", 0), in_step.get("update", 0.0)
    return replace(
        found,
        disk_bytes_per_s=(found.disk_bytes / disk_s or None) if disk_s else None,
        update_bytes_per_s=(updated / updating_s or None) if updating_s else None,
    )


def _figures(iterations: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the fields that sum up the iterations."""
    if not iterations:
        return {}

    def each(name: str) -> list[Any]:
        return [getattr(one, name) for one in iterations if getattr(one, name) is not None]

    return {
        "seconds": tuple(one.seconds[0] for one in iterations),
        **{name: statistics.median(each(name)) for name in _MEDIANS},
        **{name: round(statistics.median(each(name))) for name in _MEDIAN_BYTES},
        **{name: max(each(name), default=None) for name in _BEST},
    }


def _peak_bytes(metrics: Metrics) -> dict[str, int]:
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES}
    for sample in metrics.samples():
        for name, nbytes in sample.nbytes.items():
            found[name] = max(found.get(name, 0), nbytes)
    return found


_RSS_BYTES = 1 if sys.platform == "darwin" else 1024
