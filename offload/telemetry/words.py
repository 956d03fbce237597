"""Numbers and their names as text, the same in the report, the page, the picture and the terminal;
and as the flat numbers of logs, with the loggers that take them. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

from offload.core.errors import ConfigError
from offload.core.timeline import IN_MODEL
from offload.telemetry.iterations import OUTSIDE, is_wait

UNKNOWN: Final = "–"  # noqa: RUF001 # a dash, as tables have it

STAGING: Final = "staging of spilled gradients"  # a share of host memory

# Bytes by tier and direction: the counter, and the text for people.
MOVES: Final = {
    "disk_read_bytes": "read from disk",
    "disk_written_bytes": "written to disk",
    "spilled_bytes": "gradients written to disk",
    "spilled_read_bytes": "gradients read from disk",
    "device_to_host_bytes": "copied from device to host",
    "host_to_device_bytes": "copied from host to device",
    "updated_bytes": "read and written by the update",
}
# Causes of waits, as the engine names them. Any other cause is shown by its own name.
_CAUSES: Final = {
    "disk read": "reads of optimizer state",
    "disk write": "writes of optimizer state",
    "parameter read": "reads of parameters",
    "parameter write": "writes of parameters",
    "gradient read": "reads of gradients",
    "gradient write": "writes of gradients",
    "activation read": "reads of activations",
    "activation write": "writes of activations",
    "device copy": "copies to and from the device",
    "network": "other ranks",
}


def as_numbers(part: object, *names: str) -> dict[str, Any]:
    """Return the named attributes that are known, for a log; `waited_s` as `waited_seconds`."""
    found = {re.sub(r"(?<!_per)_s$", "_seconds", name): getattr(part, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def below(prefix: str, part: Any) -> dict[str, Any]:
    """Return the numbers of a part, a mapping or what has `to_dict()`, with `prefix/` before each
    name; none of None.
    """
    numbers = part if isinstance(part, Mapping | None) else part.to_dict()
    return {f"{prefix}/{name}": value for name, value in (numbers or {}).items()}


def flat_key(name: str) -> str:
    """Return the name as a part of a flat key."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_")


def show_part(part: str) -> str:
    """Name a part of an iteration: "in step(): update", "outside step(): waits for reads of
    parameters".
    """
    if part == OUTSIDE:
        return "outside step(), not waiting"
    return f"{_place_of(part)}: {_show_cause(part)}"


def show_wait(part: str) -> str:
    """Name a wait within a sentence: "in step() for reads of optimizer state"."""
    return f"{_place_of(part)} {_show_cause(part).removeprefix('waits ')}"


def _show_cause(part: str) -> str:
    cause = part.partition(": ")[2]
    return f"waits for {_CAUSES.get(cause, cause)}" if is_wait(part) else cause


def _place_of(part: str) -> str:
    return "outside step()" if part.startswith(IN_MODEL) else "in step()"


def show_seconds(seconds: float | None) -> str:
    """Format seconds with three digits, in a fitting unit: "1.44 s", "12.3 ms", "85 µs"."""
    if seconds is None:
        return UNKNOWN
    size = abs(seconds)
    if size >= 1 or size == 0:
        is_plain = 1000 <= size < 1e7
        return f"{seconds:,.0f} s" if is_plain else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def show_share(share: float | None) -> str:
    """Format a share as "12 %"; below 10 with one more digit."""
    if share is None:
        return UNKNOWN
    percent = 100 * share
    if abs(percent) < 9.95:
        return f"{percent:.1f} %"
    return f"{percent:.0f} %" if abs(percent) < 1e6 else f"{percent:.3g} %"


def show_rate(bytes_per_s: float | None) -> str:
    return UNKNOWN if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g} GB/s"


def show_ratio(before: float | None, after: float | None) -> str:
    """Format the ratio of `after` to `before`."""
    if before is None or after is None:
        return ""
    if before == after:
        return "same"
    if not before or not after:
        return "from 0" if after else "to 0"
    ratio = after / before
    return f"{ratio:.2f}×" if ratio < 99.5 else f"{ratio:.3g}×"  # noqa: RUF001 # times, no x


# --- loggers --------------------------------------------------------------------------------------
# Neither TensorBoard nor Weights & Biases is imported, and neither is needed.


class ScalarWriter(Protocol):
    """The method that TensorBoard's SummaryWriter has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class RunLogger(Protocol):
    """The method that a run of Weights & Biases has, and the module `wandb` itself."""

    def log(self, data: dict[str, float], *, step: int) -> Any: ...


Writer = ScalarWriter | RunLogger


def check_writer(writer: object, what: str) -> None:
    """Raise a `ConfigError` unless numbers can be written there. what: the argument, for the
    message.
    """
    if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
        raise ConfigError(
            f"{what}: expected TensorBoard's SummaryWriter (add_scalar) or a run of W&B (log), got "
            f"{type(writer).__name__}, which has neither"
        )


def log_numbers(writer: Writer, told: Mapping[str, Any], step: int) -> None:
    """Write all numbers of `told` for one step, not its texts: one by one with `add_scalar` if the
    writer has it, else at once.
    """
    check_writer(writer, "log_to")
    numbers = {name: value for name, value in told.items() if isinstance(value, int | float)}
    add: Any = getattr(writer, "add_scalar", None)
    if callable(add):
        for name, value in numbers.items():
            add(name, value, step)
    else:
        log: Any = writer.log  # type: ignore[union-attr]
        log(numbers, step=step)
