"""Which rank writes and which rank checks which bytes: every byte once, each rank about as many."""

from __future__ import annotations

import random

import pytest

from offload.checkpoint.rank_group import cut, divide, merged_ranges, share_of, within
from offload.storage.safetensors_header import TensorPlace, TensorSpec, build_header

MIB = 1 << 20


def places_of(sizes: list[int]) -> dict[str, TensorPlace]:
    return build_header([TensorSpec(f"t{i}", "U8", (n,)) for i, n in enumerate(sizes)])[1]


def drawn(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([0, 1, 7, 4095, 4096, 9001, 70_000]) for _ in range(rng.randint(0, 30))]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(20))
def test_every_byte_has_one_writer(seed: int, count: int) -> None:
    sizes = drawn(seed)
    places = places_of(sizes)
    rng = random.Random(seed)
    mixed = {name: rng.random() < 0.3 for name in places}  # those that are sharded over ranks
    bounds = {
        name: [place.nbytes * k // count for k in range(count + 1)]
        for name, place in places.items()
    }
    written: dict[str, list[tuple[int, int]]] = {name: [] for name in places}
    for rank in range(count):
        own = {
            name: ((bounds[name][rank], bounds[name][rank + 1]),) if mixed[name] else None
            for name in places
        }
        for name, ranges in divide(places, own, rank, count).items():
            written[name] += ranges
    for name, place in places.items():
        assert sum(end - begin for begin, end in written[name]) == place.nbytes
        assert merged_ranges(written[name]) == ([(0, place.nbytes)] if place.nbytes else [])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_shares_are_even_and_meet_at_blocks(count: int) -> None:
    places = places_of([3 * MIB + 5, 17, MIB, 2 * MIB + 1])
    own = dict.fromkeys(places)
    total = sum(place.nbytes for place in places.values())
    for rank in range(count):
        mine = divide(places, own, rank, count)
        ranges = merged_ranges(
            (places[name].offset + begin, places[name].offset + end)
            for name, some in mine.items()
            for begin, end in some
        )
        assert len(ranges) == 1, "a share is one piece of the file"
        (begin, end) = ranges[0]
        assert abs((end - begin) - total / count) <= 4096
        assert rank == 0 or begin % 4096 == 0


def test_what_lies_in_one_block_has_one_writer() -> None:
    extents = [(4096 + 100, 50), (4096 + 150, 50)]
    found = [cut(extents, rank, 2) for rank in range(2)]
    assert found == [[(0, 4196, 4246), (1, 4246, 4296)], []]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_every_part_is_checked_once(seed: int, count: int) -> None:
    sizes = drawn(seed)
    shares = [share_of(sizes, rank, count) for rank in range(count)]
    assert [n for share in shares for n in share] == list(range(len(sizes)))
    most, even = max(sizes, default=0), sum(sizes) / count
    assert all(sum(sizes[n] for n in share) <= even + most for share in shares)


def test_within_and_joined() -> None:
    ranges = merged_ranges([(10, 20), (0, 5), (5, 7), (30, 30), (18, 25)])
    assert ranges == [(0, 7), (10, 25)]
    assert within(ranges, 0, 100) == ranges
    assert within(ranges, 6, 11) == [(6, 7), (10, 11)]
    assert within(ranges, 7, 10) == within(ranges, 25, 30) == within([], 0, 9) == []
    assert within(ranges, 12, 13) == [(12, 13)]
