"""The machine that a forecast is for: this one, one whose profile is in a file, or a shipped one.

Shipped profiles are made from published figures, and name their sources; the engine's benchmark
was not run for them.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

from offload.core.config import format_size
from offload.core.errors import ConfigError, FormatError, StoreError
from offload.core.strict_json import printable
from offload.planning import profile
from offload.planning.limits import left_free_bytes
from offload.planning.planner import Budgets
from offload.planning.profile import Profile

_SHIPPED = Path(__file__).parent / "profiles"
_DEVICE_SHARE = 0.9  # of a device's memory: the budget if the user gives none
_DISK_SPEEDS = tuple(f"disk_{kind}_bytes_per_s" for kind in ("read", "write", "mixed"))

# For counting bytes if no speed is known; any speeds of this order would do.
NOMINAL = Profile(
    name="unknown",
    is_measured=False,
    sources=(),
    date="",
    cpu="unknown",
    cores=1,
    memory_bytes_per_s=20e9,
    update_bytes_per_s=15e9,
    disk_read_bytes_per_s=3e9,
    disk_write_bytes_per_s=3e9,
    disk_mixed_bytes_per_s=3e9,
    to_device_bytes_per_s=20e9,
    to_host_bytes_per_s=20e9,
    flops={"float32": 5e11, "bfloat16": 5e11, "float16": 5e11},
)


@dataclass(frozen=True)
class TargetMachine:
    """The machine that a forecast is for. profile: None if its speeds are not known. note: what to
    tell the user about it.
    """

    profile: Profile | None
    note: str

    @property
    def name(self) -> str:
        return "unknown" if self.profile is None else self.profile.name


def shipped() -> dict[str, Path]:
    """Return the files of the profiles that come with the package, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.json"))}


def find_machine(text: str | os.PathLike[str] | None) -> TargetMachine:
    """Find the machine that `text` names: a profile's file, or the name of a shipped profile; None:
    this machine's own, if there is one. Raises `ConfigError` if there is no such profile,
    `FormatError` if it is damaged.
    """
    if text is None:
        return _own()
    name, known = os.fspath(text), shipped()
    path = known.get(name, Path(name))
    if not path.exists():
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"on: expected a profile's file or one of {', '.join(known)}; got {printable(name)}"
            + (f"; did you mean {near[0]}?" if near else "; `offload bench` writes a file")
        )
    return _described(profile.load(path))


def _own() -> TargetMachine:
    try:
        path = profile.own_path()
        found = profile.load(path) if path.exists() else None
    except (ConfigError, FormatError, StoreError) as error:
        return TargetMachine(None, f"speeds are unknown: this machine's own profile: {error}")
    if found is None:
        return TargetMachine(
            None,
            "speeds are unknown: run `offload bench` once, or name a machine with --on "
            f"({', '.join(shipped())})",
        )
    if not found.is_of_this_machine:
        return TargetMachine(
            None, f"speeds are unknown: {path} is of another machine ({found.cpu})"
        )
    return _described(found)


def _described(found: Profile) -> TargetMachine:
    has = [f"{format_size(found.memory_bytes)} of memory"] if found.memory_bytes else []
    has += (
        [f"{found.device} of {format_size(found.device_memory_bytes)}"]
        if found.device_memory_bytes
        else []
    )
    origin = "published figures, not measured by us"
    if found.is_measured:
        origin = f"measured {found.date}: {found.cpu}, {found.cores} cores"
    return TargetMachine(found, ", ".join([origin, *has]))


def with_drives(machine: Profile, count: int) -> Profile:
    """Return the profile with so many drives of the kind that the machine has."""
    have = len(machine.disks) or 1
    if count in (0, have):
        return machine
    disks = tuple(machine.disks[n % have] for n in range(count)) if machine.disks else ()
    speeds = {name: getattr(machine, name) for name in _DISK_SPEEDS}
    times = {name: speed * (count / have) for name, speed in speeds.items() if speed is not None}
    return replace(machine, disks=disks, **times)


def missing_speeds(machine: Profile, dtype: str, drives: int, on_device: bool) -> list[str]:
    """Return the speeds that a prediction needs and the profile lacks, by the names that
    `offload bench --only` has for them.
    """
    needed: dict[str, float | None] = {
        "compute": flops_of(machine, dtype),
        "update": machine.update_bytes_per_s,
    }
    if drives:
        needed["disk"] = machine.disk_mixed_bytes_per_s
    if on_device:
        needed["copies"] = machine.to_device_bytes_per_s and machine.to_host_bytes_per_s
    return [name for name, speed in needed.items() if not speed]


def completed(machine: Profile) -> Profile:
    """Return the profile with a nominal value for every speed that is not known: enough for
    counting bytes.
    """
    names = [field.name for field in fields(Profile) if field.name.endswith("_per_s")]
    lacking = [name for name in (*names, "flops") if not getattr(machine, name)]
    return replace(machine, **{name: getattr(NOMINAL, name) for name in lacking})


def usual_budgets(machine: Profile, activations: str) -> Budgets:
    """Return the budgets on that machine if the user gives none. None: not known, or no device."""
    host, device = machine.memory_bytes, machine.device_memory_bytes
    return Budgets(
        None if host is None else host - left_free_bytes(host),
        None if device is None else int(device * _DEVICE_SHARE),
        len(machine.disks),
        activations,
    )


def flops_of(machine: Profile, dtype: str) -> float | None:
    """Return the FLOP/s of matrix products in that dtype, or in fp32 if only that is known; None:
    neither is known.
    """
    known = machine.flops or {}
    return known.get(dtype) or known.get("float32") or None
