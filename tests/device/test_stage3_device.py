"""A model that is shared out over ranks and runs on their devices: the bits of plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import stage3_cases as cases
from fake_accelerator.train_case import SCHEDULES
from launch import run

# The streams of the group and that between devices are early and late, too.
ALL = [*SCHEDULES, *(("seeded", seed) for seed in (8, 11, 15, 16, 27, 31))]


SOME = [("eager", 0), ("lazy", 0), ("seeded", 27)]
SCENES = [cases.on_disk, cases.accumulated, cases.other_models, cases.recomputed]


@pytest.mark.timeout(170)
def test_the_same_bits_under_every_schedule(tmp_path: Path) -> None:
    run(2, cases.all_schedules, str(tmp_path), ALL)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene(scene: cases.Scene, tmp_path: Path) -> None:
    run(2, cases.under, str(tmp_path), SOME, scene)
