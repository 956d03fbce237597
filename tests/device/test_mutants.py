"""Every synchronisation of the device code is needed: without it some schedule gives other bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from fake_accelerator import load
from fake_accelerator.train_case import SCHEDULES
from support.device.faults import BY_HAND
from support.device.mutants import Mutant, loaded, mutants, synchronisations
from support.device.transfer_cases import CASES, run

from offload.core.errors import StoreTimeout

ALL = mutants()
FOURTH_EARLY = ("seeded", 8)  # the others have a bit for three streams


@functools.cache
def on_the_cpu(case: Callable) -> bytes:
    return run(case, None)


def is_wrong(case: Callable, module: ModuleType) -> bool:
    try:
        return run(case, module) != on_the_cpu(case)
    # Poisoned memory as an index, memory that was still in use, a ticket that never ends.
    except (RuntimeError, AssertionError, StoreTimeout):
        return True
    finally:
        torch.accelerator.synchronize()


def killer(mutant: Mutant) -> str | None:
    """Return the first schedule and case that notice the fault; None: none does."""
    with loaded(mutant) as module:
        for schedule, seed in (*SCHEDULES, FOURTH_EARLY):
            for case in CASES:
                load(schedule, seed)  # streams count anew: a seed speaks of the first ones
                if is_wrong(case, module):
                    return f"{schedule}-{seed}: {case.__name__}"
    return None


def test_no_synchronisation_is_overlooked() -> None:
    assert len(ALL) - len(BY_HAND) == synchronisations() > 10


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant: Mutant) -> None:
    assert killer(mutant), "no schedule and no case notices it"
