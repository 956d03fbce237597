"""Interleaved measurement: every contestant runs once a round, in turn, on the same memory.

Machines are noisy and drift, so a figure alone says little. Here each round gives one time for
every contestant, and what is reported are medians, their spread, and ratios of medians within one
run. A run over much memory is cut into parts of some milliseconds; all contestants do one part
before any does the next, and the times of the parts are added. So all are measured under the same
conditions. Each result is checked in every round.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20


def huge_tensor(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate zeros in memory of their own, aligned to 2 MiB, with huge pages asked for."""
    nbytes = numel * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + HUGE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_BYTES
    return whole[start : start + nbytes].view(dtype)


@dataclass
class Contestant:
    """One way to do the work: one call for each part. `check` runs after each timed call, with the
    part's number, and raises if the result is wrong.
    """

    name: str
    runs: list[Callable[[], object]]
    check: Callable[[int], None]
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Return half the distance between the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s


def hold(
    contestants: list[Contestant], rounds: int, reset: Callable[[int], None], warm_up: int = 2
) -> None:
    """Fill in the contestants' times. The order turns by one place for each part, so that no
    contestant always follows the same one.
    """
    parts = len(contestants[0].runs)
    for number in range(-warm_up, rounds):
        spent_s = dict.fromkeys((contestant.name for contestant in contestants), 0.0)
        for part in range(parts):
            turn = (number * parts + part) % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                reset(part)
                begin = time.perf_counter()
                contestant.runs[part]()
                spent_s[contestant.name] += time.perf_counter() - begin
                contestant.check(part)
        if number >= 0:
            for contestant in contestants:
                contestant.seconds.append(spent_s[contestant.name])


def rounds(default: int) -> int:
    """Return the number of rounds of a benchmark: the environment's, or else the default."""
    return int(os.environ.get("OFFLOAD_BENCH_ROUNDS") or default)
