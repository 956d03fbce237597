"""How much blocks may have on a device, by what other code holds there and how far that grew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.allowance import CHECKS, LEAST, LIMIT, Gauge, device_budget_of, run

from offload.params.device_budget import DeviceBudget


def allowed(device_budget: DeviceBudget, phase: str = "forward") -> int:
    """Return the bytes that blocks may have at the first unit of a run of that phase."""
    with device_budget.moving((phase, 0)):
        return device_budget.blocks_bytes


@pytest.mark.parametrize("check", CHECKS)
def test_in_any_case(check: Callable[[], None]) -> None:
    check()


def test_a_phase_is_known_when_half_of_the_units_were_seen_and_the_run_is_over() -> None:
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    run(device_budget, gauge, growths=(0,))
    assert allowed(device_budget) == LEAST, "one of four units"
    for unit in range(2):
        with device_budget.moving(("forward", unit)):
            assert device_budget.blocks_bytes == LEAST
    with device_budget.moving():
        assert device_budget.blocks_bytes == LEAST, "the run is not over"
    device_budget.end_run()
    assert allowed(device_budget) == LIMIT
    run(device_budget, gauge, "backward", growths=(0, 0))
    assert allowed(device_budget, "backward") == allowed(device_budget) == LIMIT


def test_the_unit_that_still_runs_was_not_seen() -> None:
    """Its growth is known only when blocks move again."""
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    for unit in range(2):
        with device_budget.moving(("forward", unit)):
            pass
    device_budget.end_run()
    assert allowed(device_budget) == LEAST
    device_budget.end_run()
    assert allowed(device_budget) == LIMIT


@pytest.mark.parametrize("others", [LIMIT - LEAST + 1, LIMIT, LIMIT + 7])
def test_less_than_the_least_is_told_as_it_is(others: int) -> None:
    gauge = Gauge(others)
    device_budget = device_budget_of(gauge)
    assert allowed(device_budget) == LIMIT - others
    run(device_budget, gauge)
    assert allowed(device_budget) == LIMIT - others


def test_others_are_read_when_blocks_begin_to_move() -> None:
    gauge = Gauge(others=50)
    device_budget = device_budget_of(gauge)
    run(device_budget, gauge)
    with device_budget.moving(("forward", 0)):
        gauge.grow(others=30)
        with device_budget.moving(("forward", 0)):
            assert device_budget.others_bytes == 50, "they move already"
        assert device_budget.blocks_bytes == LIMIT - 50
    with device_budget.moving():
        assert device_budget.others_bytes == 80
        assert device_budget.blocks_bytes == LIMIT - 80, "what came while blocks moved is no growth"


def test_blocks_are_no_others() -> None:
    gauge = Gauge(others=50)
    device_budget = device_budget_of(gauge)
    for unit in range(4):
        with device_budget.moving(("forward", unit)):
            gauge.grow(blocks=200 - gauge.blocks)
    device_budget.end_run()
    assert allowed(device_budget) == LIMIT - 50
    assert device_budget.others_bytes == device_budget.others_peak_bytes == 50


def test_room_is_left_by_the_largest_growth_of_the_same_phase() -> None:
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    run(device_budget, gauge, "forward", (40, 0, 10, 0))
    run(device_budget, gauge, "backward", (0, 90, 0, 0))
    assert allowed(device_budget, "forward") == LIMIT - 80
    assert allowed(device_budget, "backward") == LIMIT - 180
    run(device_budget, gauge, "forward", (0, 0, 0, 45))
    run(device_budget, gauge, "forward", (1, 1, 1, 1))
    assert allowed(device_budget, "forward") == LIMIT - 90, "the largest ever"
    assert allowed(device_budget, "backward") == LIMIT - 180


def test_a_growth_that_stays_counts_as_others_too() -> None:
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    for unit in range(3):  # activations
        with device_budget.moving(("forward", unit)):
            pass
        gauge.grow(others=30)
    with device_budget.moving():
        pass
    device_budget.end_run()
    assert allowed(device_budget) == LIMIT - 90 - 2 * 30
    assert device_budget.others_peak_bytes == 90


def test_growth_is_counted_from_one_move_of_blocks_to_the_next() -> None:
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    run(device_budget, gauge)
    with device_budget.moving(("forward", 1)):
        pass
    gauge.grow(others=25)
    with device_budget.moving():  # the use is the same
        assert device_budget.blocks_bytes == LIMIT - 25 - 2 * 25
    gauge.grow(others=20)
    with device_budget.moving(("backward", 1)):
        assert device_budget.blocks_bytes == LEAST
    assert allowed(device_budget, "forward") == LIMIT - 45 - 2 * 25
    assert allowed(device_budget, "backward") == LEAST, "nothing of that was its growth"


def test_the_peak_of_others_is_that_of_any_time() -> None:
    gauge = Gauge(others=20)
    device_budget = device_budget_of(gauge)
    run(device_budget, gauge, growths=(5, 70, 0, 0))
    assert device_budget.others_peak_bytes == 90
    run(device_budget, gauge, growths=(5, 0, 0, 0))
    assert device_budget.others_peak_bytes == 90
    assert device_budget.others_bytes == 20


# --- longer batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "room"),
    [(10, 80), (5, 80), (15, 80), (20, 100), (40, 200), (100, 500)],
    ids=["same", "shorter", "little-longer", "twice", "four-times", "ten-times"],
)
def test_a_longer_batch_leaves_room_in_proportion(numel: int, room: int) -> None:
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    device_budget.expect(10)
    run(device_budget, gauge, growths=(40, 0, 0, 0))
    device_budget.expect(numel)
    assert allowed(device_budget) == LIMIT - room


def test_a_batch_is_longer_than_any_before_only_once() -> None:
    gauge = Gauge()
    device_budget = device_budget_of(gauge)
    for numel, room in [(10, 0), (30, 150), (30, 80), (20, 80), (60, 100), (60, 80)]:
        device_budget.expect(numel)
        expected = LIMIT - room if numel != 10 else LEAST
        assert allowed(device_budget) == expected, numel
        run(device_budget, gauge, growths=(40, 0, 0, 0))


def test_blocks_keep_the_least_for_all_that_a_longer_batch_may_want() -> None:
    gauge = Gauge(others=100)
    device_budget = device_budget_of(gauge)
    device_budget.expect(1)
    run(device_budget, gauge, growths=(40, 0, 0, 0))
    device_budget.expect(1000)
    assert allowed(device_budget) == LEAST, "it is a guess"
    with device_budget.moving():
        gauge.grow(others=770)
    assert allowed(device_budget) == LIMIT - 870 - 80, "they have less without the guess"


# --- what can be reclaimed ------------------------------------------------------------------------


def test_what_can_be_reclaimed_is_not_held_by_others() -> None:
    gauge, reclaimable = Gauge(others=300), [120]
    device_budget = device_budget_of(gauge, lambda: reclaimable[0])
    run(device_budget, gauge)
    assert allowed(device_budget) == LIMIT - 300 + 120
    reclaimable[0] = 0
    assert allowed(device_budget) == LIMIT - 300


def test_excess_is_what_must_go_before_more_is_taken() -> None:
    gauge = Gauge(others=300)
    device_budget = device_budget_of(gauge, lambda: 120)
    run(device_budget, gauge, growths=(0, 25, 0, 0))
    with device_budget.moving(("forward", 0)):
        gauge.grow(blocks=500)
        assert device_budget.excess_bytes(150) == 0, "300 + 500 + 150, and 50 of room"
        assert device_budget.excess_bytes(160) == 10
        assert device_budget.excess_bytes(100) == -50, "as much is free"
        gauge.grow(others=-120)  # it is reclaimed
        assert device_budget.excess_bytes(160) == 10 - 120
