"""A search for the least budget that works. It asks for plans, which allocate nothing."""

from __future__ import annotations

from collections.abc import Callable

from offload.core.errors import CapacityError

_STEP_BYTES = 4096
_MOST_BYTES = 1 << 34


def least_bytes(plan: Callable[[int], object]) -> int:
    """Return the least bytes, in whole pages, for which `plan` does not raise `CapacityError`."""
    low, high = 0, _MOST_BYTES // _STEP_BYTES
    plan(high * _STEP_BYTES)  # raises errors that do not depend on the budget
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan(middle * _STEP_BYTES)
            high = middle
        except CapacityError:
            low = middle
    return high * _STEP_BYTES
