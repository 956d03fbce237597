"""The least budget that works: found by asking for plans, which allocate nothing."""

from __future__ import annotations

from collections.abc import Callable

from offload.core.errors import CapacityError

_STEP_BYTES = 4096
_MOST_BYTES = 1 << 34


def least_bytes(plan: Callable[[int], object]) -> int:
    """The least bytes for which `plan` does not raise `CapacityError`, to a page."""
    low, high = 0, _MOST_BYTES // _STEP_BYTES
    plan(high * _STEP_BYTES)  # whatever else is wrong is told here
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan(middle * _STEP_BYTES)
            high = middle
        except CapacityError:
            low = middle
    return high * _STEP_BYTES
