"""Prefetch: it keeps the budget and the blocks in use, and evicts the block used farthest ahead."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import chain, cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loops import chosen, tally

from offload.params.prefetch import (
    PrefetchMoves,
    TierState,
    derive_depth,
    look_ahead,
    make_room,
    next_uses,
)

ONES = [1] * 10


def tier(
    sizes: list[int], budget: int, held: set[int], pinned: AbstractSet[int] = frozenset()
) -> TierState:
    return TierState(sizes, budget - sum(sizes[block] for block in held), held, pinned)


def test_next_uses() -> None:
    assert next_uses([3, 1, 3, 2], 4) == {3: 0, 1: 1, 2: 3}
    assert list(next_uses(cycle([2, 0]), 5)) == [2, 0]  # ends, though the future does not


def test_what_comes_next_is_fetched_as_far_as_there_is_room() -> None:
    uses = next_uses([1, 2, 3, 4], 10)
    assert look_ahead(tier(ONES, 10, {0}), uses, 2) == PrefetchMoves((), (1, 2))
    assert look_ahead(tier(ONES, 3, {0}, {0}), uses, 4) == PrefetchMoves((), (1, 2))
    assert look_ahead(tier(ONES, 10, {1, 2}), uses, 2) == PrefetchMoves()
    assert look_ahead(tier(ONES, 10, {0}), uses, 0) == PrefetchMoves()


def test_the_farthest_goes() -> None:
    uses = next_uses([1, 2, 3, 0], 10)
    # 7 is never used again, 0 later than 1.
    assert look_ahead(tier(ONES, 3, {0, 7, 2}), uses, 1) == PrefetchMoves((7,), (1,))
    assert look_ahead(tier(ONES, 2, {0, 2}), uses, 1) == PrefetchMoves((0,), (1,))
    # A block that is needed earlier is not evicted for it.
    assert look_ahead(tier(ONES, 2, {1, 2}), uses, 3) == PrefetchMoves()


def test_one_at_a_time() -> None:
    uses = next_uses([1, 2], 3)
    assert look_ahead(tier(ONES, 1, {0}, {0}), uses, 2) == PrefetchMoves()
    assert look_ahead(tier(ONES, 1, {0}), uses, 2) == PrefetchMoves((0,), (1,))
    assert make_room(tier(ONES, 1, {0}), uses, 1) == (0,)
    assert make_room(tier(ONES, 1, {0}, {0}), uses, 1) is None
    assert make_room(tier(ONES, 2, {0}, {0}), uses, 1) == ()


@settings(max_examples=chosen(test=60, torture=3000))
@given(data=st.data())
def test_moves_are_always_legal(data: st.DataObject) -> None:
    tally("hypothesis examples")
    count = data.draw(st.integers(1, 8))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    blocks = st.sets(st.integers(0, count - 1))
    held = data.draw(blocks)
    pinned = held & data.draw(blocks)
    budget = sum(sizes[b] for b in held) + data.draw(st.integers(0, 20))
    ahead = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    depth = data.draw(st.integers(0, count + 1))
    uses = next_uses(ahead, count)
    moves = look_ahead(tier(sizes, budget, held, pinned), uses, depth)
    assert not set(moves.evict) & pinned and set(moves.evict) <= held
    assert not set(moves.fetch) & (held - set(moves.evict))
    assert set(moves.fetch) <= set(islice(uses, depth))
    assert not set(moves.fetch) & set(moves.evict)
    after = (held - set(moves.evict)) | set(moves.fetch)
    assert sum(sizes[b] for b in after) <= budget
    far = float("inf")
    for block in moves.fetch:
        assert all(uses.get(b, far) > min(uses[f] for f in moves.fetch) for b in moves.evict), block


def simulate(order: list[int], sizes: list[int], budget: int, depth: int, rounds: int) -> int:
    """Return how many uses had to wait for a fetch, in the last round of a known order."""
    held: set[int] = set()
    waits = 0
    for turn in range(rounds):
        waits = 0
        for at, block in enumerate(order):
            ahead = chain(order[at + 1 :], cycle(order))
            uses = next_uses(ahead, len(sizes))
            if block not in held:
                waits += 1
                room = make_room(tier(sizes, budget, held), uses, sizes[block])
                assert room is not None
                held = (held - set(room)) | {block}
            moves = look_ahead(tier(sizes, budget, held, {block}), uses, depth)
            held = (held - set(moves.evict)) | set(moves.fetch)
            assert sum(sizes[b] for b in held) <= budget and turn >= 0
    return waits


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 10])
def test_a_known_order_hits(budget: int) -> None:
    order = [*range(10), *reversed(range(10))]
    waits = simulate(order, ONES, budget, depth=2, rounds=3)
    assert waits == (18 if budget == 1 else 0)  # the turning points hit even then


def test_reuse_is_as_good_as_can_be() -> None:
    """Without prefetch the farthest-first rule misses as seldom as any rule can."""
    order = [*range(10), *reversed(range(10))]
    assert simulate(order, ONES, 4, depth=0, rounds=4) == 2 * (10 - 4)


def test_depth_follows_the_speeds() -> None:
    assert derive_depth([], []) == 2
    assert derive_depth([0.1] * 5, [1.0] * 5) == 2
    assert derive_depth([3.0] * 5, [1.0] * 5) == 4
    assert derive_depth([100.0] * 5, [1.0] * 5) == 8
    assert derive_depth([1.0], [0.0]) == 8
    assert derive_depth([1.0] * 39 + [50.0], [1.0] * 40) == 2  # a straggler does not count
