"""The request for a forecast of a training, checked before anything is done. Needs no torch."""

from __future__ import annotations

import difflib
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.core.config import ACTIVATIONS, PARAM_DTYPES, parse_name, parse_size
from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.tools.forecast.model_shape import NO_SHAPE, Shape

if TYPE_CHECKING:  # it imports torch, which the checks do not need
    from offload.planning.planner import Budgets

OPTIMIZERS = ("adamw", "adam", "sgd", "lion")
PREPARE, WRAP = "prepare", "wrap"
_SHAPE = tuple(field.name for field in fields(Shape) if field.name != "key_value_heads")


@dataclass(frozen=True)
class ForecastRequest:
    """A request for the forecast of a training.

    host_bytes, device_bytes: budgets; None: the machine's usual ones. drives: how many; None: those
    that the machine has. drive_bytes: free on them; None: not known. dtype: None: the model's own.
    save_every: steps between checkpoints; None: never. endurance_tb: terabytes written that one
    drive is rated for. on: a profile's file, or the name of a shipped one; None: this machine's
    own. use: the call that the training uses. lora: the rank of the adapters that are trained,
    beside a frozen model; None: the model is. full: simulate every layer and every chunk; otherwise
    those that are alike are taken from a few.
    """

    model: str
    shape: Shape = NO_SHAPE
    batch: int = 1
    sequence: int = 1024
    steps: int = 10_000
    save_every: int | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    drives: int | None = None
    drive_bytes: int | None = None
    activations: str = "keep"
    on: str | None = None
    endurance_tb: float | None = None
    use: str = PREPARE
    lora: int | None = None
    full: bool = False

    @classmethod
    def of(cls, model: str | os.PathLike[str], **given: Any) -> ForecastRequest:
        """Make a request from keywords as `offload.plan` takes them; None counts as not given.
        Raises `ConfigError` for a value that is wrong and for a name that is unknown.
        """
        for name in given:
            if name not in FIELDS:
                near = difflib.get_close_matches(name, FIELDS, n=1)
                raise ConfigError(
                    f"{name}: no such field of a plan for a model that is named"
                    + (f"; did you mean {near[0]}?" if near else "")
                    + f"; fields: {', '.join(FIELDS)}"
                )
        known = {name: value for name, value in given.items() if value is not None}
        if "nvme" in known and "nvme_count" in known:
            raise ConfigError("nvme_count: give it or nvme, not both")
        made: dict[str, Any] = {
            field: parse(name, known[name])
            for name, (field, parse) in _PARSERS.items()
            if name in known
        }
        if made.get("use") == WRAP and made.get("activations") == "offload":
            raise ConfigError(
                "activations: wrap cannot offload them, since it has no part in the model; take "
                '"recompute", and checkpoint the layers in the model itself, or use prepare'
            )
        if "nvme" in known:
            made["drive_bytes"] = _free_bytes(known["nvme"])
        made["shape"] = Shape(**{name: known[name] for name in _SHAPE if name in known})
        return cls(model=os.fspath(model), **made)

    def within(self, usual: Budgets) -> Budgets:
        """Return the budgets; one that is not given is the usual one."""
        given: dict[str, Any] = {
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "directories": self.drives,
        }
        return replace(usual, **{name: n for name, n in given.items() if n is not None})


def _whole(name: str, value: object, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: expected a whole number, {least} or more, got {value!r}")
    return value


def _terabytes(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"{name}: expected terabytes above 0, such as 600, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _count_directories(name: str, value: Any) -> int:
    """Return the number of drives that are given by their directories, which must exist."""
    paths = _paths(value)
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"{name}: {printable(path)} is not a directory; make it, or give another"
            )
    return len(paths)


def _paths(value: Any) -> list[Path]:
    return [Path(path) for path in ([value] if isinstance(value, str | os.PathLike) else value)]


def _free_bytes(value: Any) -> int:
    """Return the bytes that are free for us on the file systems of these directories."""
    free = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in _paths(value)}
    return sum(free.values())


def _yes_or_no(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {value!r}")
    return value


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    return lambda name, value: parse_name(name, value, allowed)


# By keyword: the field of the request, and what makes it of a keyword and its value.
_PARSERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "batch": ("batch", _whole),
    "sequence": ("sequence", _whole),
    "steps": ("steps", _whole),
    "save_every": ("save_every", _whole),
    "optimizer": ("optimizer", _one_of(*OPTIMIZERS)),
    "dtype": ("dtype", _one_of(*PARAM_DTYPES)),
    "host_memory": ("host_bytes", parse_size),
    "device_memory": ("device_bytes", parse_size),
    "nvme": ("drives", _count_directories),
    "nvme_count": ("drives", lambda name, value: _whole(name, value, 0)),
    "activations": ("activations", _one_of(*ACTIVATIONS)),
    "on": ("on", lambda name, value: os.fspath(value)),
    "endurance": ("endurance_tb", _terabytes),
    "use": ("use", _one_of(PREPARE, WRAP)),
    "lora": ("lora", _whole),
    "full": ("full", _yes_or_no),
}
FIELDS = (*_SHAPE, *_PARSERS)
