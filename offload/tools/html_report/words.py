"""Numbers as text, the same in the page, the picture and the terminal."""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "–"  # noqa: RUF001 # a dash, as tables have it

# Causes of waits, as the engine names them. Any other cause is shown by its own name.
_CAUSES: Final = {
    "disk read": "reads of optimizer state",
    "disk write": "writes of optimizer state",
    "parameter read": "reads of parameters",
    "parameter write": "writes of parameters",
    "activation read": "reads of activations",
    "activation write": "writes of activations",
    "device copy": "copies to and from the device",
    "network": "other ranks",
}


def show_part(part: str) -> str:
    """Name a part of an iteration: `step(): disk read`, `model: parameter read`, `outside`."""
    if part == "outside":
        return "outside step(), not waiting"
    place, _, cause = part.partition(": ")
    if place == "model":
        return f"waits outside step(): {_CAUSES.get(cause, cause)}"
    if cause in _CAUSES:
        return f"waits in step(): {_CAUSES[cause]}"
    return part


def show_wait(part: str) -> str:
    """Name a wait within a sentence: "in step() for reads of optimizer state"."""
    place, _, cause = part.partition(": ")
    where = "outside step()" if place == "model" else "in step()"
    return f"{where} for {_CAUSES.get(cause, cause)}"


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
