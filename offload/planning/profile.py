"""The profile of a machine: its speeds, and the best tuning found on it. One file, one schema.

`offload bench` writes the speeds, `offload tune` the best tuning, `plan` reads the former and
`prefetch_depth="auto"` the latter. All of them access the file through this module only, so that
every key that one writes is a key that another reads. A file that is not exactly of this form is
refused, with the place in it.

Several machines may share a home directory: what the machine's own file says of another machine is
not used. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from offload.core.config import ACTIVATIONS
from offload.core.errors import ConfigError, FormatError
from offload.core.host_facts import read_cpu, usable_cores
from offload.core.portable import read_json, write_private
from offload.core.strict_json import read_as, shown

FORMAT = "offload profile"
VERSION = 1
MOST_FILE_BYTES = 1 << 20
MOST_TUNED = 200  # models that a file holds; the oldest are dropped
_MOST_A_SECOND = 1e24
_NEAR = 0.1  # budgets that differ by less than this share are taken for the same


@dataclass(frozen=True)
class Tuning:
    """The settings that a profile may give and the engine otherwise derives. None: it derives the
    value.
    """

    prefetch_depth: int | None = None  # units ahead
    unit_bytes: int | None = None  # neighbouring layers form one unit up to so many bytes
    chunk_numel: int | None = None  # elements of optimizer state that move together
    queue_depth: int | None = None  # disk operations in flight
    threads: int | None = None  # of the update
    activations: str | None = None  # for activations="auto"
    timeout_s: float | None = None  # the deadline of a disk operation

    def __post_init__(self) -> None:
        for name, least in (
            ("prefetch_depth", 0),
            ("unit_bytes", 1),
            ("chunk_numel", 1),
            ("queue_depth", 1),
            ("threads", 1),
            ("timeout_s", 1e-3),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise FormatError(f"{name}: expected {least} or more, got {shown(value)}")
        if self.activations not in (None, *ACTIVATIONS):
            raise FormatError(
                f"activations: expected {', '.join(ACTIVATIONS)}, got {shown(self.activations)}"
            )

    def __str__(self) -> str:
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{n} {v}" for n, v in known.items() if v is not None) or "all as derived"


@dataclass(frozen=True)
class TuningTarget:
    """The facts by which a profile tells models apart. model: `fingerprint` of its parameters.
    host_bytes, device_bytes: the budgets; None: none was given.
    """

    model: str
    device: str
    host_bytes: int | None
    device_bytes: int | None
    directories: int


@dataclass(frozen=True)
class Tuned(TuningTarget):
    """The best tuning that was found for one target. name: of the model. step_s, spread_s: of a
    whole iteration, median and half of the middle half's width. limit_s: what the drive and the
    cores need at least.
    """

    name: str
    tuning: Tuning
    step_s: float
    spread_s: float
    stall_share: float
    limit_s: float
    date: str

    @property
    def target(self) -> TuningTarget:
        return TuningTarget(*(getattr(self, field.name) for field in fields(TuningTarget)))


@dataclass(frozen=True)
class DriveProfile:
    """The speeds of one directory's drive, bytes a second. mixed: reads and writes at once,
    together. sustained: mixed, after many times what a drive's cache holds; None: not measured.
    """

    directory: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    sustained_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_speeds(self)


@dataclass(frozen=True)
class Profile:
    """The profile of one machine. None: not known. is_measured: by `offload bench` on that machine;
    else from `sources`, which were published.
    """

    name: str
    is_measured: bool
    sources: tuple[str, ...]
    date: str
    cpu: str
    cores: int
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None  # a copy, read and written
    update_bytes_per_s: float | None = None  # AdamW, over all that it reads and writes
    disks: tuple[DriveProfile, ...] = ()
    # Of all drives at once, as a step uses them.
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    disk_mixed_bytes_per_s: float | None = None
    device: str | None = None  # None: it computes on its cores
    device_memory_bytes: int | None = None
    to_device_bytes_per_s: float | None = None
    to_host_bytes_per_s: float | None = None
    flops: dict[str, float] | None = None  # a second, of large products, by type
    compute_beside_disk: float | None = None  # speed of products while the drives work, of alone
    update_beside_disk: float | None = None  # the same of the update
    tuned: tuple[Tuned, ...] = ()

    def __post_init__(self) -> None:
        _check_speeds(self)
        for name, flops in (self.flops or {}).items():
            _check_speed(f"flops: {name}", flops)
        for name in ("name", "cpu", "device"):
            text = getattr(self, name)
            if text is not None and not text.isprintable():
                raise FormatError(f"{name}: expected letters that can be printed, got {text!a}")

    def with_tuned(self, found: Tuned) -> Profile:
        """Return the profile with this tuning in place of that for the same model and budgets."""
        others = [tuned for tuned in self.tuned if tuned.target != found.target]
        return replace(self, tuned=(*others, found)[-MOST_TUNED:])

    def tuned_for(self, wanted: TuningTarget) -> Tuned | None:
        """Return the newest tuning that was found for this model within budgets like these."""
        for tuned in reversed(self.tuned):
            host_bytes, device_bytes = tuned.host_bytes, tuned.device_bytes
            near = _is_near(host_bytes, wanted.host_bytes)
            near &= _is_near(device_bytes, wanted.device_bytes)
            same = replace(wanted, host_bytes=host_bytes, device_bytes=device_bytes)
            if near and tuned.target == same:
                return tuned
        return None

    @property
    def is_of_this_machine(self) -> bool:
        return (self.cpu, self.cores) == this_machine()

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that only its owner can read; an existing file is replaced."""
        write_private(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")


def _check_speeds(owner: DriveProfile | Profile) -> None:
    for field in fields(owner):
        if field.name.endswith("_bytes_per_s") and getattr(owner, field.name) is not None:
            _check_speed(field.name, getattr(owner, field.name))


def _check_speed(name: str, value: float) -> None:
    """Refuse a speed that no hardware has: plans divide by it."""
    if not 1 <= value <= _MOST_A_SECOND:
        raise FormatError(
            f"{name}: expected a speed from 1 to {_MOST_A_SECOND:g} a second, got {shown(value)}"
        )


def fingerprint(params: Iterable[tuple[Iterable[int], str, bool]]) -> str:
    """Compute the fingerprint of a model: its parameters' shapes, types (`float32`) and whether
    they are trained; in any order and under any names, so that a stand-in of the same shape counts
    as the same.
    """
    lines = sorted(f"{'x'.join(map(str, shape))} {kind} {on:d}" for shape, kind, on in params)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def this_machine() -> tuple[str, int]:
    """Return what tells machines apart: the processor, and the number of cores that this process
    may use.
    """
    cpu = read_cpu()
    return cpu.model or "unknown", max(1, int(usable_cores(cpu) or 1))


# --- files ----------------------------------------------------------------------------------------


def own_path() -> Path:
    """Return the path of the machine's own profile, in the user's configuration directory."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(base).expanduser() / "offload" / "profile.json"
    except RuntimeError as error:  # no home directory
        raise ConfigError(
            f"profile: {error}; set HOME or XDG_CONFIG_HOME, or name a file"
        ) from error


def load(path: str | os.PathLike[str]) -> Profile:
    """Read what `Profile.save` has written. Raises `FormatError` where it is not that, `StoreError`
    where it cannot be read.
    """
    remedy = "; make it anew with `offload bench` and `offload tune`"
    return read_json(Path(path), MOST_FILE_BYTES, from_dict, remedy)


def from_dict(data: Any) -> Profile:
    """Make a profile from what `to_dict` gives. Raises `FormatError` where it is not that."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FormatError(f'expected "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise FormatError(f"expected version {VERSION}, got {shown(data.get('version'))}")
    plain = {key: value for key, value in data.items() if key not in ("format", "version")}
    profile = read_as(Profile, plain)
    if len(profile.tuned) > MOST_TUNED:
        raise FormatError(f"tuned: expected at most {MOST_TUNED}, got {len(profile.tuned)}")
    return profile


def _is_near(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _NEAR * max(one, other)
