"""How much blocks may have on a device, by what others hold there and by how much they grew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.allowance import CHECKS, LEAST, LIMIT, Gauge, allowance_of, run

from offload.tiers.allowance import Allowance


def allowed(allowance: Allowance, phase: str = "forward") -> int:
    """At the first unit of a run of that phase."""
    with allowance.moving((phase, 0)):
        return allowance.blocks_bytes


@pytest.mark.parametrize("check", CHECKS)
def test_in_any_case(check: Callable[[], None]) -> None:
    check()


def test_a_phase_is_known_when_half_of_the_units_were_seen_and_the_run_is_over() -> None:
    gauge = Gauge()
    allowance = allowance_of(gauge)
    run(allowance, gauge, growths=(0,))
    assert allowed(allowance) == LEAST, "one of four units"
    for unit in range(2):
        with allowance.moving(("forward", unit)):
            assert allowance.blocks_bytes == LEAST
    with allowance.moving():
        assert allowance.blocks_bytes == LEAST, "the run is not over"
    allowance.end_run()
    assert allowed(allowance) == LIMIT
    run(allowance, gauge, "backward", growths=(0, 0))
    assert allowed(allowance, "backward") == allowed(allowance) == LIMIT


def test_the_unit_that_still_runs_was_not_seen() -> None:
    """Its growth is known only when blocks move again."""
    gauge = Gauge()
    allowance = allowance_of(gauge)
    for unit in range(2):
        with allowance.moving(("forward", unit)):
            pass
    allowance.end_run()
    assert allowed(allowance) == LEAST
    allowance.end_run()
    assert allowed(allowance) == LIMIT


@pytest.mark.parametrize("others", [LIMIT - LEAST + 1, LIMIT, LIMIT + 7])
def test_less_than_the_least_is_told_as_it_is(others: int) -> None:
    gauge = Gauge(others)
    allowance = allowance_of(gauge)
    assert allowed(allowance) == LIMIT - others
    run(allowance, gauge)
    assert allowed(allowance) == LIMIT - others


def test_others_are_read_when_blocks_begin_to_move() -> None:
    gauge = Gauge(others=50)
    allowance = allowance_of(gauge)
    run(allowance, gauge)
    with allowance.moving(("forward", 0)):
        gauge.grow(others=30)
        with allowance.moving(("forward", 0)):
            assert allowance.others_bytes == 50, "they move already"
        assert allowance.blocks_bytes == LIMIT - 50
    with allowance.moving():
        assert allowance.others_bytes == 80
        assert allowance.blocks_bytes == LIMIT - 80, "what came while blocks moved is no growth"


def test_blocks_are_no_others() -> None:
    gauge = Gauge(others=50)
    allowance = allowance_of(gauge)
    for unit in range(4):
        with allowance.moving(("forward", unit)):
            gauge.grow(blocks=200 - gauge.blocks)
    allowance.end_run()
    assert allowed(allowance) == LIMIT - 50
    assert allowance.others_bytes == allowance.others_peak_bytes == 50


def test_room_is_left_by_the_largest_growth_of_the_same_phase() -> None:
    gauge = Gauge()
    allowance = allowance_of(gauge)
    run(allowance, gauge, "forward", (40, 0, 10, 0))
    run(allowance, gauge, "backward", (0, 90, 0, 0))
    assert allowed(allowance, "forward") == LIMIT - 80
    assert allowed(allowance, "backward") == LIMIT - 180
    run(allowance, gauge, "forward", (0, 0, 0, 45))
    run(allowance, gauge, "forward", (1, 1, 1, 1))
    assert allowed(allowance, "forward") == LIMIT - 90, "the largest ever"
    assert allowed(allowance, "backward") == LIMIT - 180


def test_a_growth_that_stays_counts_as_others_too() -> None:
    gauge = Gauge()
    allowance = allowance_of(gauge)
    for unit in range(3):  # activations
        with allowance.moving(("forward", unit)):
            pass
        gauge.grow(others=30)
    with allowance.moving():
        pass
    allowance.end_run()
    assert allowed(allowance) == LIMIT - 90 - 2 * 30
    assert allowance.others_peak_bytes == 90


def test_growth_is_counted_from_one_move_of_blocks_to_the_next() -> None:
    gauge = Gauge()
    allowance = allowance_of(gauge)
    run(allowance, gauge)
    with allowance.moving(("forward", 1)):
        pass
    gauge.grow(others=25)
    with allowance.moving():  # the use is the same
        assert allowance.blocks_bytes == LIMIT - 25 - 2 * 25
    gauge.grow(others=20)
    with allowance.moving(("backward", 1)):
        assert allowance.blocks_bytes == LEAST
    assert allowed(allowance, "forward") == LIMIT - 45 - 2 * 25
    assert allowed(allowance, "backward") == LEAST, "nothing of that was its growth"


def test_the_peak_of_others_is_that_of_any_time() -> None:
    gauge = Gauge(others=20)
    allowance = allowance_of(gauge)
    run(allowance, gauge, growths=(5, 70, 0, 0))
    assert allowance.others_peak_bytes == 90
    run(allowance, gauge, growths=(5, 0, 0, 0))
    assert allowance.others_peak_bytes == 90
    assert allowance.others_bytes == 20


# --- longer batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "room"),
    [(10, 80), (5, 80), (15, 80), (20, 100), (40, 200), (100, 500)],
    ids=["same", "shorter", "little-longer", "twice", "four-times", "ten-times"],
)
def test_a_longer_batch_leaves_room_in_proportion(numel: int, room: int) -> None:
    gauge = Gauge()
    allowance = allowance_of(gauge)
    allowance.expect(10)
    run(allowance, gauge, growths=(40, 0, 0, 0))
    allowance.expect(numel)
    assert allowed(allowance) == LIMIT - room


def test_a_batch_is_longer_than_any_before_only_once() -> None:
    gauge = Gauge()
    allowance = allowance_of(gauge)
    for numel, room in [(10, 0), (30, 150), (30, 80), (20, 80), (60, 100), (60, 80)]:
        allowance.expect(numel)
        expected = LIMIT - room if numel != 10 else LEAST
        assert allowed(allowance) == expected, numel
        run(allowance, gauge, growths=(40, 0, 0, 0))


def test_blocks_keep_the_least_for_all_that_a_longer_batch_may_want() -> None:
    gauge = Gauge(others=100)
    allowance = allowance_of(gauge)
    allowance.expect(1)
    run(allowance, gauge, growths=(40, 0, 0, 0))
    allowance.expect(1000)
    assert allowed(allowance) == LEAST, "it is a guess"
    with allowance.moving():
        gauge.grow(others=770)
    assert allowed(allowance) == LIMIT - 870 - 80, "they have less without the guess"


# --- what others would give up --------------------------------------------------------------------


def test_what_can_be_reclaimed_is_not_held_by_others() -> None:
    gauge, reclaimable = Gauge(others=300), [120]
    allowance = allowance_of(gauge, lambda: reclaimable[0])
    run(allowance, gauge)
    assert allowed(allowance) == LIMIT - 300 + 120
    reclaimable[0] = 0
    assert allowed(allowance) == LIMIT - 300


def test_excess_is_what_must_go_before_more_is_taken() -> None:
    gauge = Gauge(others=300)
    allowance = allowance_of(gauge, lambda: 120)
    run(allowance, gauge, growths=(0, 25, 0, 0))
    with allowance.moving(("forward", 0)):
        gauge.grow(blocks=500)
        assert allowance.excess_bytes(150) == 0, "300 + 500 + 150, and 50 of room"
        assert allowance.excess_bytes(160) == 10
        assert allowance.excess_bytes(100) == -50, "as much is free"
        gauge.grow(others=-120)  # it has gone
        assert allowance.excess_bytes(160) == 10 - 120
