"""A model that is shared out over ranks and runs on their devices: the bits of plain training.

Processes take longer to start than most scenes run, so each scene runs under all its schedules in
the same ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_accelerator.train_case import SCHEDULES
from support.device import stage3_cases as cases
from support.device.faults import OF_STREAMS
from support.device.mutants import Mutant, mutant_of, mutants_of_ranks
from support.loops import chosen, tally
from support.mutation import Fault
from support.ranks.launch import outcomes, run

# The streams of the group and that between devices are early and late, too.
SEEDS = [("seeded", seed) for seed in (8, 11, 15, 16, 27, 31)]
ALL = chosen(
    test=[("eager", 0), ("lazy", 0), ("seeded", 11), ("seeded", 27)], torture=[*SCHEDULES, *SEEDS]
)
# A stream of the model's own is early, all others are late.
SIDES = [("seeded", seed) for seed in (32, 64, 128)]
LAZY, MIXED = ("lazy", 0), ("seeded", 27)
BOTH = [LAZY, MIXED]
FAULTS = mutants_of_ranks()


@pytest.mark.timeout(chosen(test=300, torture=1200))
def test_the_same_bits_under_every_schedule(tmp_path: Path) -> None:
    deadline_s = chosen(test=240, torture=1000)
    run(2, cases.all_schedules, str(tmp_path), ALL, deadline_s=deadline_s)
    tally("schedules", len(ALL))


@pytest.mark.parametrize(
    ("scene", "schedules"),
    [
        (cases.on_disk, chosen(test=[MIXED], torture=BOTH)),
        (cases.accumulated, chosen(test=[LAZY], torture=BOTH)),
    ],
    ids=["on disk", "accumulated"],
)
def test_under_some_schedules(
    scene: cases.Scene, schedules: list[tuple[str, int]], tmp_path: Path
) -> None:
    run(2, cases.under, str(tmp_path), schedules, [scene])
    tally("schedules", len(schedules))


@pytest.mark.parametrize("schedule", BOTH, ids=lambda one: f"{one[0]}-{one[1]}")
def test_what_a_loop_may_do(schedule: tuple[str, int], tmp_path: Path) -> None:
    scenes = cases.SCENES[:4] if schedule == LAZY else cases.SCENES[4:]
    run(2, cases.under, str(tmp_path), [schedule], scenes)
    tally("schedules")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].name)
def test_a_fault_is_noticed(fault: tuple[Mutant, tuple[str, int]], tmp_path: Path) -> None:
    mutant, schedule = fault
    found = outcomes(2, cases.with_fault, str(tmp_path), mutant, [schedule], deadline_s=60)
    assert any(one.error or one.exit_code for one in found), "no rank notices it"
    assert not any("nothing has changed" in (one.error or "") for one in found), "there is no fault"
    tally("planted faults")


def test_without_a_fault_nothing_is_noticed(tmp_path: Path) -> None:
    run(2, cases.with_fault, str(tmp_path), None, sorted({schedule for _, schedule in FAULTS}))


def test_gradients_that_several_streams_make(tmp_path: Path) -> None:
    schedules = chosen(test=[LAZY, *SIDES], torture=[*ALL, *SIDES])
    assert run(2, cases.forked, str(tmp_path), None, schedules) == [True, True]
    tally("schedules", len(schedules))


@pytest.mark.parametrize("fault", OF_STREAMS, ids=lambda fault: fault.what)
def test_waits_for_several_streams_are_needed(fault: Fault, tmp_path: Path) -> None:
    found = outcomes(2, cases.forked, str(tmp_path), mutant_of(fault), SIDES)
    assert any(one.result is not True for one in found), "no rank notices it"
    tally("planted faults")
