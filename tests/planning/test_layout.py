"""How state is cut into chunks: every element once, aligned, nothing shared."""

from __future__ import annotations

import random

import pytest

from offload.planning.layout import ParamSpec, lay_out, layout_size, slices_by_param

FIELDS = ("exp_avg", "exp_avg_sq")
HALF = ("master", *FIELDS)


@pytest.mark.parametrize("number", range(40))
def test_every_element_has_one_place(number: int) -> None:
    draw = random.Random(number)
    sizes = [draw.choice([0, 1, 15, 16, 17, 100, 4096, 5000, 20000]) for _ in range(30)]
    params = [ParamSpec(f"p{i}", n, draw.choice([FIELDS, HALF, ()])) for i, n in enumerate(sizes)]
    chunk_numel = draw.choice([64, 1000, 4096, 1 << 20])
    chunks = lay_out(params, chunk_numel)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    places = slices_by_param(chunks)
    for index, param in enumerate(params):
        ends = [0, *(part.end for _, part in places.get(index, []))]
        begins = [part.begin for _, part in places.get(index, [])]
        assert begins == ends[:-1]
        assert ends[-1] == (param.numel if param.fields else 0)
        assert all(chunk.fields == param.fields for chunk, _ in places.get(index, []))
        assert all(part.begin % 16 == 0 for _, part in places.get(index, []))
    for chunk in chunks:
        assert chunk.numel % 1024 == 0 and chunk.nbytes == 4 * chunk.numel * len(chunk.fields)
        assert [chunk.begins[field] for field in chunk.fields] == [
            i * chunk.numel for i in range(len(chunk.fields))
        ]
        used = 0
        for part in chunk.slices:
            assert part.offset % 16 == 0 and part.offset >= used
            used = part.offset + part.end - part.begin
        assert used <= min(chunk.numel, -(-chunk_numel // 16) * 16)


def test_small_parameters_share_a_chunk() -> None:
    chunks = lay_out([ParamSpec(f"p{i}", 10, FIELDS) for i in range(50)], 4096)
    assert len(chunks) == 1 and chunks[0].name == "p0[0:10] and 49 more"


def test_the_name_of_a_chunk_says_whose_it_is() -> None:
    chunks = lay_out([ParamSpec("w", 10000, FIELDS)], 4096)
    assert [chunk.name for chunk in chunks] == ["w[0:4096]", "w[4096:8192]", "w[8192:10000]"]


@pytest.mark.parametrize("number", range(40))
def test_the_size_of_a_layout_is_known_without_it(number: int) -> None:
    draw = random.Random(number)
    chunk_numel = draw.choice([16, 64, 1000, 4096, 5000])
    near = [0, 1, 15, 16, 17, chunk_numel - 1, chunk_numel, chunk_numel + 1, 3 * chunk_numel]
    params = [
        ParamSpec(
            f"p{n}",
            draw.choice([*near, draw.randint(0, 7 * chunk_numel)]),
            draw.choice([FIELDS, HALF, ()]),
            unit=draw.choice([None, 0, 1]),
        )
        for n in range(draw.randint(0, 12))
    ]
    sizes = [chunk.nbytes for chunk in lay_out(params, chunk_numel)]
    assert layout_size(params, chunk_numel) == (sum(sizes), max(sizes, default=0))
