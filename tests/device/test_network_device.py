"""Ranks whose blocks are on devices: slices from host memory, gathered and summed up there."""

from __future__ import annotations

import pytest
import torch
from fake_accelerator.train_case import SCHEDULES
from support.device import network_cases as cases
from support.ranks.launch import run

# The fourth stream, that between devices, is early and late, too.
ALL = [*SCHEDULES, *(("seeded", seed) for seed in (8, 11, 15))]


@pytest.mark.parametrize("schedule", ALL, ids=lambda one: f"{one[0]}-{one[1]}")
def test_gathered_and_summed(schedule: tuple[str, int]) -> None:
    for rank, (found, gathered, reduced) in enumerate(run(2, cases.gather_and_sum, *schedule)):
        for number in range(cases.BLOCKS):
            whole = torch.cat([cases.values(each, number) for each in range(2)])
            assert torch.equal(found[number], whole)
            mean = whole.div(2) + (whole * 2).div(2)
            assert torch.equal(found[cases.BLOCKS + number], mean.view(2, -1)[rank])
        assert gathered == reduced == 4 * cases.SLICE * cases.BLOCKS


def test_a_device_without_collectives_is_refused_on_all() -> None:
    first, second = run(2, cases.without_a_backend)
    assert "rank 1 cannot go on" in first and "no backend for fake" in first
    assert second.startswith("ConfigError") and "process_group=False" in second
