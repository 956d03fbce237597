"""Every step of the way to the device and back is needed: without it something is other than on the
plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_accelerator import load
from support.device.mutants import Mutant, mutants_of_models, patched
from support.device.prepare_cases import EXPECTED, SCENES
from support.device.transfer_cases import register

from offload.core.budget import Budget
from offload.core.errors import OffloadError
from offload.core.pool import Pool
from offload.params import gradients, prepared, units
from offload.planning import planner


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> Iterator[None]:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)
    monkeypatch.setattr(prepared, "Pool", partial(Pool, register=register))
    monkeypatch.setattr(gradients, "STAGING_MOST_BYTES", 1024)
    load("eager", 0)
    torch.set_num_threads(1)
    yield
    torch.accelerator.synchronize()


@pytest.mark.parametrize("scene", SCENES)
def test_without_a_fault_all_is_well(scene: Callable[..., None], tmp_path: Path) -> None:
    for schedule in (("eager", 0), ("lazy", 0), ("seeded", 5)):
        scene(tmp_path, schedule)


@pytest.mark.parametrize("mutant", mutants_of_models(), ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    for expect in EXPECTED:  # without the fault
        expect()
    with patched(mutant):
        assert any(
            is_wrong(partial(scene, tmp_path, schedule))
            for schedule in (("lazy", 0), ("eager", 0))
            for scene in SCENES
        )


def is_wrong(run: Callable[[], None]) -> bool:
    try:
        run()
    except (AssertionError, AttributeError, KeyError, RuntimeError, OffloadError):
        return True
    finally:
        torch.accelerator.synchronize()
    return False
