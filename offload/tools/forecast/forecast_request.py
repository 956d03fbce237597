"""The request for the forecast of a training, checked before anything is done."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.core.config import ACTIVATIONS, PARAM_DTYPES, parse_name, parse_size
from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.tools.forecast.model_shape import Shape

if TYPE_CHECKING:  # it imports torch, which the checks do not need
    from offload.planning.planner import Budgets

OPTIMIZERS = ("adamw", "adam", "sgd", "lion")
_SHAPE = tuple(field.name for field in fields(Shape) if field.name != "key_value_heads")
NO_SHAPE = Shape()
_WHOLE = ("batch", "sequence", "steps")


@dataclass(frozen=True)
class ForecastRequest:
    """A request for the forecast of a training.

    host_bytes, device_bytes: budgets; None: the machine's usual ones. drives: how many; None: those
    that the machine has. dtype: None: the model's own. save_every: steps between checkpoints; None:
    never. endurance_tb: terabytes written that one drive is rated for. on: a profile's file, or the
    name of a shipped one; None: this machine's own.
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
    activations: str = "keep"
    on: str | None = None
    endurance_tb: float | None = None

    @classmethod
    def of(cls, model: str | os.PathLike[str], **given: Any) -> ForecastRequest:
        """Make a request from keywords as `offload.plan` takes them; None counts as not given.
        Raises `ConfigError` for a value that is wrong and for a name that is unknown.
        """
        known = {name: value for name, value in given.items() if value is not None}
        _refuse_unknown(given)
        made: dict[str, Any] = {
            name: _whole(name, known[name], 1) for name in _WHOLE if name in known
        }
        made["shape"] = Shape(**{name: known[name] for name in _SHAPE if name in known})
        if "save_every" in known:
            made["save_every"] = _whole("save_every", known["save_every"], 1)
        for name, field in (("host_memory", "host_bytes"), ("device_memory", "device_bytes")):
            if name in known:
                made[field] = parse_size(name, known[name])
        for name, allowed in (("optimizer", OPTIMIZERS), ("dtype", PARAM_DTYPES)):
            if name in known:
                made[name] = parse_name(name, known[name], allowed)
        if "activations" in known:
            made["activations"] = parse_name("activations", known["activations"], ACTIVATIONS)
        if "endurance" in known:
            made["endurance_tb"] = _terabytes(known["endurance"])
        if "on" in known:
            made["on"] = os.fspath(known["on"])
        return cls(model=os.fspath(model), drives=_drives(known), **made)

    def within(self, usual: Budgets) -> Budgets:
        """Return the budgets; one that is not given is the usual one."""
        given: dict[str, Any] = {
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "directories": self.drives,
        }
        return replace(usual, **{name: n for name, n in given.items() if n is not None})


FIELDS = (
    *_SHAPE,
    *_WHOLE,
    "save_every",
    "optimizer",
    "dtype",
    "host_memory",
    "device_memory",
    "nvme",
    "nvme_count",
    "activations",
    "on",
    "endurance",
)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            raise ConfigError(
                f"{name}: no such field of a plan for a model that is named"
                + (f"; did you mean {near[0]}?" if near else "")
                + f"; fields: {', '.join(FIELDS)}"
            )


def _whole(name: str, value: object, least: int) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: expected a whole number, {least} or more, got {value!r}")
    return value


def _terabytes(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"endurance: expected terabytes above 0, such as 600, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _drives(known: Mapping[str, Any]) -> int | None:
    """Return the number of drives, given as such or by directories, which must exist; None if it is
    not given.
    """
    count, directories = known.get("nvme_count"), known.get("nvme")
    if directories is None:
        return None if count is None else _whole("nvme_count", count, 0)
    if count is not None:
        raise ConfigError("nvme_count: give it or nvme, not both")
    one = isinstance(directories, str | os.PathLike)
    paths = [Path(path) for path in ([directories] if one else directories)]
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"nvme: {printable(path)} is not a directory; make it, or give another"
            )
    return len(paths)
