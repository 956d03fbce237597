"""What must be given back when a test has ended."""

from __future__ import annotations

import gc
import time

from offload.budget import Budget

WITHIN_S = 60.0


def await_nothing_held(budget: Budget) -> None:
    """Wait until no host memory of the budget is in use, for a minute at most.

    A thread of autograd's lets go of a graph a moment after `backward()` has returned, which on a
    busy machine is any time later; the graph holds what the engine has given to it.
    """
    end_s = time.monotonic() + WITHIN_S
    gc.collect()
    while budget.used_bytes:
        if time.monotonic() > end_s:
            raise AssertionError(
                f"{budget.used_bytes:,} bytes of the budget are in use {WITHIN_S:.0f} s after the "
                f"test, by {budget.holders()}; expected none: something still holds a lease, or a "
                "view of one"
            )
        time.sleep(0.01)
        gc.collect()
