"""Ranks whose blocks are on devices: slices from host memory, gathered and summed up there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_accelerator.train_case import SCHEDULES
from support.device import network_cases as cases
from support.loops import chosen, tally
from support.ranks.launch import run

# The fourth stream, that between devices, is early and late, too.
ALL = chosen(
    test=[("eager", 0), ("lazy", 0), *(("seeded", seed) for seed in (3, 5, 8, 11))],
    torture=[*SCHEDULES, *(("seeded", seed) for seed in (8, 11, 15))],
)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, int], list[Any]]:
    """Run all cases on two ranks; return what each rank found, by schedule."""
    each = run(2, cases.under_all, ALL)
    return {schedule: [found[n] for found in each] for n, schedule in enumerate(ALL)}


@pytest.mark.parametrize("schedule", ALL, ids=lambda one: f"{one[0]}-{one[1]}")
def test_gathered_and_summed(
    schedule: tuple[str, int], results: dict[tuple[str, int], list[Any]]
) -> None:
    tally("schedules")
    for rank, (found, gathered, reduced) in enumerate(results[schedule]):
        for number in range(cases.BLOCKS):
            whole = torch.cat([cases.values(each, number) for each in range(2)])
            assert torch.equal(found[number], whole)
            mean = whole.div(2) + (whole * 2).div(2)
            assert torch.equal(found[cases.BLOCKS + number], mean.view(2, -1)[rank])
        assert gathered == reduced == 4 * cases.SLICE * cases.BLOCKS


def test_a_device_without_collectives_is_refused_on_all() -> None:
    first, second = run(2, cases.without_a_backend)
    assert "rank 1 failed, so no rank continues" in first and "no backend for fake" in first
    assert second.startswith("ConfigError") and "process_group=False" in second
