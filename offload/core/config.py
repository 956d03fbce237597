"""The user's configuration as one frozen dataclass.

`Config` holds what the user wants, in bytes and names; the planner derives all else from it and
shows it in the plan. Every field is checked here, alone and against the other fields, before the
engine touches anything. Reads no environment variable but HOME, for a path with `~`.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offload.core.errors import ConfigError

if TYPE_CHECKING:
    import torch  # `import offload` must not need it: `offload doctor` and `verify` run without

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MAX_BYTES = 2**63 - 1  # the most that file offsets and tensor sizes can count
_C = TypeVar("_C", bound=type)

PARAM_DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16", "int8")
ACTIVATIONS = ("keep", "recompute", "offload")


def parse_size(name: str, value: int | str) -> int:
    """Parse bytes from a whole number or a string such as "512MiB" or "1.5 GB"; 1 to 2**63 - 1.

    Raises `ConfigError`, which names the field `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f'{name}: expected bytes or a size such as "8GiB", got {_show(value)}')
    nbytes = value if isinstance(value, int) else _parse_size_text(name, value)
    if not 0 < nbytes <= _MAX_BYTES:
        raise ConfigError(
            f"{name}: expected more than 0 bytes and at most 2**63 - 1, got {_show(value)}"
        )
    return nbytes


def _parse_size_text(name: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if not match or unit is None:
        raise ConfigError(
            f'{name}: expected bytes or a size such as "512MiB" or "8GiB", got {_show(text)}'
        )
    try:
        return math.floor(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    except (ValueError, OverflowError):  # int() reads 4300 digits at most; a float becomes inf
        return _MAX_BYTES + 1


def format_size(nbytes: int) -> str:
    """Format `nbytes` for messages and tables: "8 GiB", "1.5 MiB", "12 B"."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def parse_name(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return `value` as a name if it is one of `allowed`, else raise `ConfigError`. A torch dtype
    counts as its name.
    """
    text = (value if isinstance(value, str) else _show(value)).removeprefix("torch.")
    if text not in allowed:
        raise ConfigError(
            f"{name}: expected {_any_of(allowed)}, got {_show(value)}{_nearest(text, allowed)}"
        )
    return text


def _refuse_unknown_fields(cls: _C) -> _C:
    """Make `cls` raise a `ConfigError` with the nearest field for an unknown keyword, no TypeError.

    A class decorator.
    """
    known = [field.name for field in fields(cls)]
    init = cls.__init__  # type: ignore[misc]  # of this class, not of a subclass

    @functools.wraps(init)  # keeps the signature that the dataclass made
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"{name}: no such field{_nearest(name, known)}; fields: {', '.join(known)}"
                )
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@_refuse_unknown_fields
@dataclass(frozen=True)
class Config:
    """The configuration of `wrap` and `prepare`; each field is also a keyword argument of both.

    Sizes may be given as strings and are kept in bytes; dtypes may be given as torch dtypes and are
    kept by name. The constructor raises `ConfigError` for a wrong value or an unknown field.

    device: the accelerator that torch has, else the CPU ("auto"), or a device by name.

    device_memory: bytes this process may hold on the device, activations included. None: the free
    device memory less a margin.

    host_memory: host bytes that the engine may hold. None: leaves 20 % of the machine (or cgroup)
    free, and at least 8 GiB, but no more than 40 %.

    nvme: one directory or several for bytes that do not fit in memory. Kept as a tuple of paths;
    None: no disk.

    param_dtype: compute dtype. None: as the model; for bf16 and fp16 an exact fp32 master is kept.
    Others are not built yet and raise.

    state_dtype: storage of the optimizer's moments: "float32". "bfloat16" and "int8" are not built
    yet and raise.

    activations: saved activations: "keep" on the device, "recompute" in backward, or "offload" to
    the host; "auto": from the tuned profile, else "keep".

    prefetch_depth: units fetched ahead; "auto": from the tuned profile, else from the trace.

    max_grad_norm: clip the global gradient norm to this inside the update. None: no clipping here.

    release_grads: wrap: free device gradients as they reach the host. `p.grad` is then None: clip
    with `max_grad_norm`, and drop gradients with `optimizer.zero_grad()`, not the model's. Among
    ranks: also average gradients over them during backward, without DistributedDataParallel.

    process_group: process group to shard over. None: the default group, if initialized; False: no
    sharding.

    self_check: for this many first steps a sample of each slice is updated again by torch and
    compared.

    profile: file that `offload tune` wrote. None: the machine's own, if there is one.

    strict: any degradation raises instead of being reported.
    """

    device: str | torch.device = "auto"
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    nvme: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None
    param_dtype: torch.dtype | str | None = None
    state_dtype: torch.dtype | str = "float32"
    activations: str = "keep"
    prefetch_depth: int | str = "auto"
    max_grad_norm: float | None = None
    release_grads: bool = False
    process_group: Any = None
    self_check: int = 0
    profile: str | os.PathLike[str] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for field in ("device_memory", "host_memory"):
            if (value := getattr(self, field)) is not None:
                self._set(field, parse_size(field, value))
        self._set("nvme", _paths("nvme", self.nvme))
        if self.param_dtype is not None:
            self._set("param_dtype", parse_name("param_dtype", self.param_dtype, PARAM_DTYPES))
        self._set("state_dtype", parse_name("state_dtype", self.state_dtype, STATE_DTYPES))
        self._set(
            "activations", parse_name("activations", self.activations, (*ACTIVATIONS, "auto"))
        )
        device_type = _check_device(self.device)
        # Check types first, here and below: the comparison of an array with a string is no bool.
        if not isinstance(self.prefetch_depth, str) or self.prefetch_depth != "auto":
            _check_count("prefetch_depth", self.prefetch_depth, 'or "auto"')
        if self.max_grad_norm is not None:
            _check_norm("max_grad_norm", self.max_grad_norm)
        _check_count("self_check", self.self_check)
        _check_flag("release_grads", self.release_grads)
        _check_flag("strict", self.strict)
        if self.profile is not None:
            (profile,) = _paths("profile", [self.profile]) or ()
            self._set("profile", profile)
        if device_type == "cpu" and self.device_memory is not None:
            raise ConfigError(
                "device_memory: the CPU has no device memory of its own; give host_memory instead"
            )

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(
            self, field, value
        )  # the only way to normalise a field of a frozen dataclass

    @classmethod
    def of(cls, config: Config | None = None, **changes: Any) -> Config:
        """Return `config` (or the defaults) with `changes`, checked as a new `Config` is."""
        if config is None:
            return cls(**changes)
        if not isinstance(config, cls):
            raise ConfigError(f"config: expected an offload.Config, got {type(config).__name__}")
        return replace(config, **changes)


def _paths(name: str, value: object) -> tuple[Path, ...] | None:
    if value is None:
        return None
    single = isinstance(value, str | bytes | os.PathLike) or not isinstance(value, Iterable)
    items: list[Any] = [value] if single else list(value)  # type: ignore[call-overload]
    if not items:
        raise ConfigError(
            f"{name}: expected one path or several, got an empty list; give None for no disk"
        )
    paths = tuple(_path(name, item) for item in items)
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{name}: the same path is given twice: {', '.join(map(str, paths))}")
    return paths


def _path(name: str, item: object) -> Path:
    """Return `item` as a path with `~` expanded. Does not check whether it exists."""
    try:
        text = os.fspath(item)  # type: ignore[call-overload]
    except TypeError:  # no path, or a PathLike whose __fspath__ returns no str or bytes
        text = None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name}: expected a path, got {_show(item)}")
    try:
        nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: expected a path, got {_show(text)}: {error}") from error
    if nul:
        raise ConfigError(f"{name}: expected a path without NUL characters, got {_show(text)}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{name}: no home directory for the ~ in {_show(text)}; write the path out"
        ) from error


def _check_device(device: object) -> str | None:
    """Return the device's type, None for "auto". Raises `ConfigError` if torch does not know it."""
    if isinstance(device, str) and device == "auto":
        return None
    import torch

    reason = f"the type is {type(device).__name__}"
    if isinstance(device, str | int | torch.device):
        try:
            return torch.device(device).type
        except Exception as error:  # torch raises RuntimeError, TypeError or ValueError, by no rule
            reason = str(error)
    raise ConfigError(f'device: expected "auto" or a torch device, got {_show(device)}: {reason}')


def _check_count(name: str, value: object, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        expected = f"a whole number from 0 on {otherwise}".rstrip()
        raise ConfigError(f"{name}: expected {expected}, got {_show(value)}")


def _check_norm(name: str, value: object) -> None:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number above all floats
        number = math.inf
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise ConfigError(f"{name}: expected a finite number above 0, or None, got {_show(value)}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {_show(value)}")


def _show(value: object) -> str:
    """Return `repr(value)` for a message: cut if long; the type if `repr` raises (10**5000)."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; did you mean {match[0]!r}?" if match else ""
