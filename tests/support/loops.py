"""The three loops that run the tests: quick, test and torture; OFFLOAD_LOOP says which.

`chosen` picks how much of something a loop does; `tally` counts what was done, for the lines at the
end of a run. What is counted in a worker reaches the process that prints.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TypeVar

T = TypeVar("T")

NAMES = ("quick", "test", "torture")
LOOP = os.environ.get("OFFLOAD_LOOP", "test")
if LOOP not in NAMES:
    raise ValueError(f"OFFLOAD_LOOP is {LOOP!r}; it is one of {', '.join(NAMES)}")

_given = os.environ.get("OFFLOAD_TEST_SEED", "20261116")
if not _given.removeprefix("-").isdecimal():
    raise ValueError(f"OFFLOAD_TEST_SEED is {_given!r}; it is a whole number")
SEED = int(_given)  # of all drawn cases
SHUFFLE = os.environ.get("OFFLOAD_TEST_SHUFFLE")  # the seed of another order of the tests

counted: Counter[str] = Counter()


def settings() -> str:
    """Return a line for the head of a run."""
    order = f", shuffled by OFFLOAD_TEST_SHUFFLE={SHUFFLE}" if SHUFFLE else ""
    return f"seed {SEED} (change it with OFFLOAD_TEST_SEED){order}"


def chosen(*, test: T, torture: T, quick: T | None = None) -> T:
    """Return the value for this loop; `quick` is that of `test` unless it is given."""
    if LOOP == "torture":
        return torture
    return quick if LOOP == "quick" and quick is not None else test


def tally(kind: str, count: int = 1) -> None:
    """Count what a test has done, such as 'kills': the run tells the sums at its end."""
    counted[kind] += count
