"""The choice of the tuning that a call runs with: that of the profile that was named, or of the
machine's own; in a trial of the tuner, the trial's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from offload import kernels
from offload.core.config import Config, format_size
from offload.core.errors import ConfigError, FormatError, StoreError
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.planning import profile
from offload.planning.profile import Profile, Tuned, Tuning, TuningTarget
from offload.planning.trial import Trial, current

AUTO = "auto"
UNTUNED = Tuning()


@dataclass(frozen=True)
class ChosenTuning:
    """The tuning that was chosen for one call. source: the file. note: why an existing profile was
    not used as intended. trial: the tuner's trial that this process runs.
    """

    tuning: Tuning = UNTUNED
    source: Path | None = None
    note: str | None = None
    trial: Trial | None = None

    def __str__(self) -> str:
        return f"{self.tuning}; from {self.source}" if self.source else "none"

    def apply_to(self, config: Config) -> Config:
        """Fill in what the config leaves open."""
        changes: dict[str, Any] = {}
        if self.trial is not None:
            self.trial.note_prepared(config.prefetch_depth == AUTO, config.activations == AUTO)
        if config.prefetch_depth == AUTO and self.tuning.prefetch_depth is not None:
            changes["prefetch_depth"] = self.tuning.prefetch_depth
        if config.activations == AUTO:
            changes["activations"] = self.tuning.activations or "keep"
        return Config.of(config, **changes) if changes else config

    def in_force(self, config: Config, is_wrapped: bool = False) -> ChosenTuning:
        """Drop the values that the user has set otherwise, and those that have no effect where only
        an optimizer is wrapped.
        """
        left: dict[str, None] = {}
        if is_wrapped or config.prefetch_depth != AUTO:
            left["prefetch_depth"] = None
        if is_wrapped or config.activations != AUTO:
            left["activations"] = None
        if is_wrapped:
            left["unit_bytes"] = None
        return replace(self, tuning=replace(self.tuning, **left))

    def begin(self, metrics: Metrics) -> None:
        """Apply the values for the whole process, and report the note as a fall-back."""
        if self.note is not None:
            metrics.fall_back("profile", self.note)
        if self.tuning.threads is not None:
            kernels.set_num_threads(self.tuning.threads)

    @property
    def store_options(self) -> dict[str, Any]:
        """The options for a `DiskStore`."""
        options = {"depth": self.tuning.queue_depth, "timeout_s": self.tuning.timeout_s}
        return {name: value for name, value in options.items() if value is not None}


NOTHING = ChosenTuning()


def choose(
    config: Config, params: Iterable[Tensor], device: str, among_ranks: bool
) -> ChosenTuning:
    """Choose the tuning for a model with these parameters. A file that was named must exist and be
    well-formed; the machine's own file is ignored where it does not or is not, or has nothing for
    this model.
    """
    trial = current()
    if trial is not None:
        return _on_trial(trial, config, params, device, among_ranks)
    if among_ranks:  # all must have the same units and depth, and each machine has files of its own
        if config.profile is None:
            return NOTHING
        return ChosenTuning(
            note="is not used among several ranks, which must agree on every number"
        )
    path, found, note = _find(config)
    if found is None or path is None:
        return ChosenTuning(note=note)
    tuned = found.tuned_for(_target(config, params, device))
    if tuned is not None:
        return ChosenTuning(tuned.tuning, path, note)
    if config.profile is None:
        return NOTHING
    return ChosenTuning(note=f"{path} has no tuning for this model and budget{_known(found.tuned)}")


def _on_trial(
    trial: Trial, config: Config, params: Iterable[Tensor], device: str, among_ranks: bool
) -> ChosenTuning:
    if among_ranks:
        raise ConfigError(
            "offload tune: runs one process, and here are several ranks, which use no profile; "
            "start the loop without them"
        )
    trial.note_target(_target(config, params, device))
    return ChosenTuning(trial.tuning, trial.path, trial=trial)


def _target(config: Config, params: Iterable[Tensor], device: str) -> TuningTarget:
    """Return the facts by which a profile knows a model."""
    return TuningTarget(
        model=fingerprint_of(params),
        device=device,
        host_bytes=None if config.host_memory is None else int(config.host_memory),
        device_bytes=None if config.device_memory is None else int(config.device_memory),
        directories=len(config.nvme or ()),  # type: ignore[arg-type]
    )


def fingerprint_of(params: Iterable[Tensor]) -> str:
    return profile.fingerprint(
        (param.shape, str(param.dtype).removeprefix("torch."), param.requires_grad)
        for param in params
    )


def _find(config: Config) -> tuple[Path | None, Profile | None, str | None]:
    if config.profile is not None:
        path = Path(config.profile)
        if not path.exists():
            raise ConfigError(f"profile: {path} is not there; `offload tune` writes one")
        return path, profile.load(path), None
    try:
        path = profile.own_path()
        if not path.exists():
            return None, None, None
        found = profile.load(path)
    except (ConfigError, FormatError, StoreError, OSError) as error:
        return None, None, f"the machine's own is not used: {error}"
    if not found.is_of_this_machine:
        LOG.info("%s is of another machine (%s) and is not used", path, found.cpu)
        return None, None, None
    return path, found, None


def _known(tuned: Iterable[Tuned]) -> str:
    each = [
        f"{t.name} on {t.device} with "
        + ("no host budget" if t.host_bytes is None else format_size(t.host_bytes))
        for t in tuned
    ]
    return f"; it has {', '.join(each[:5])}" if each else "; it has none at all"
