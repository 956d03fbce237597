"""Free space: nothing overlaps, nothing is lost, free neighbours are one piece."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.interrupts import interrupt_at
from support.loops import chosen, tally

from offload.core.errors import StateError
from offload.core.extents import Extents

CAPACITY, ALIGN = 64 * 16, 16


def take(extents: Extents, size: int) -> int | None:
    """Take `size` at the place that `find` tells, as the owners do."""
    begin = extents.find(size)
    if begin is not None:
        extents.take_at(begin, size)
    return begin


class ExtentsMachine(RuleBasedStateMachine):
    """A machine that takes and returns at random, against a plain list that knows the owner of
    every byte.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(CAPACITY, ALIGN)
        self.owner: list[int | None] = [None] * CAPACITY
        self.taken: dict[int, int] = {}
        tally("hypothesis examples")

    @rule(size=st.integers(1, CAPACITY))
    def take(self, size: int) -> None:
        begin = take(self.extents, size)
        rounded = -(-size // ALIGN) * ALIGN
        if begin is None:
            longest = max(
                map(len, "".join("." if o is None else "#" for o in self.owner).split("#"))
            )
            assert longest < rounded, f"{size} were refused though {longest} in a row are free"
            return
        assert begin % ALIGN == 0
        assert all(o is None for o in self.owner[begin : begin + rounded])
        assert begin + rounded <= CAPACITY
        self.owner[begin : begin + rounded] = [begin] * rounded
        self.taken[begin] = rounded

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        begin = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.give_back(begin)
        size = self.taken.pop(begin)
        self.owner[begin : begin + size] = [None] * size

    @invariant()
    def numbers_agree(self) -> None:
        assert self.extents.used == sum(self.taken.values())
        assert self.extents._taken == self.taken
        runs = "".join("." if o is None else "#" for o in self.owner).split("#")
        assert self.extents.largest_free == max(map(len, runs))


ExtentsMachine.TestCase.settings = settings(
    max_examples=chosen(test=20, torture=1000), stateful_step_count=60
)
TestExtentsMachine = ExtentsMachine.TestCase


def test_sizes_are_not_rounded_to_powers_of_two() -> None:
    extents = Extents(100 * 4096, 4096)
    assert [take(extents, 33 * 4096) for _ in range(3)] == [0, 33 * 4096, 66 * 4096]
    assert extents.largest_free == 4096


def test_the_smallest_piece_that_fits_is_taken() -> None:
    extents = Extents(100)
    a, b, c = take(extents, 30), take(extents, 10), take(extents, 20)
    assert (a, b, c) == (0, 30, 40)
    extents.give_back(0)
    assert take(extents, 25) == 0  # 30 are free at 0 and 40 at 60: the smaller one serves
    assert take(extents, 40) == 60


def test_what_was_not_taken_cannot_be_given_back() -> None:
    extents = Extents(100)
    begin = take(extents, 10)
    assert begin == 0
    extents.give_back(begin)
    with pytest.raises(StateError, match="nothing is taken at 0"):
        extents.give_back(begin)


@pytest.mark.parametrize("capacity,align", [(-1, 1), (10, 4), (10, 0)])
def test_bad_ranges_are_refused(capacity: int, align: int) -> None:
    with pytest.raises(StateError):
        Extents(capacity, align)


def test_an_interrupted_change_leaves_it_whole() -> None:
    """A signal handler raises between any two instructions: the change is done or not done."""
    for change in ("take", "give_back"):
        outcomes = set()
        for instruction in itertools.count(1):
            extents = Extents(100, 10)
            begins = [take(extents, 20) for _ in range(5)]
            assert begins == [0, 20, 40, 60, 80]
            extents.give_back(20)
            extents.give_back(60)
            with (
                contextlib.suppress(KeyboardInterrupt),
                interrupt_at(instruction, Extents) as reached,
            ):
                take(extents, 10) if change == "take" else extents.give_back(40)
            assert extents.used == sum(extents._taken.values())
            outcomes.add(extents.used)
            for begin in list(extents._taken):
                extents.give_back(begin)
            assert (extents.used, extents.largest_free) == (0, 100)
            if not reached:
                break
        assert outcomes == ({60, 70} if change == "take" else {60, 40})
        assert instruction > 50
