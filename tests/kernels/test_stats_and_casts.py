"""Gradient statistics and casts: exact where they can be, the same on every instruction set and
thread count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.kernels import (
    SIZES,
    SPECIAL,
    assert_same_bits,
    assert_untouched_around,
    awkward,
    cuts,
    misaligned,
    unaligned,
)

from offload import _native, kernels
from offload.core.errors import ConfigError
from offload.kernels import calls

pytestmark = pytest.mark.kernels

ISAS = kernels.available_isas()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.forced_isa(request.param):
        yield request.param


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares_is_right(isa: str, dtype: torch.dtype, numel: int) -> None:
    grad = torch.randn(numel).to(dtype)
    exact = math.fsum(
        (grad.double() ** 2).tolist()
    )  # squares are exact in double, fsum rounds once
    stats = kernels.grad_stats(grad)
    assert stats.finite
    # Each block adds 512 squares a lane and 32 lanes: fewer than 520 roundings of 2**-53.
    assert stats.sum_squares == pytest.approx(exact, rel=520 * 2**-53, abs=0)
    assert stats.norm == pytest.approx(math.sqrt(exact), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares_has_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    for numel, shift in ((5, 0), (4097, 1), (100_003, 3)):
        grad = unaligned(torch.randn(numel).to(dtype), shift)
        seen = set()
        for name, threads in itertools.product(ISAS, (1, 2, 5)):
            with kernels.forced_isa(name):
                kernels.set_num_threads(threads)
                seen.add(kernels.grad_stats(grad).block_sums)
        assert len(seen) == 1, f"{dtype}, {numel} elements: {len(seen)} different results"


def test_slices_add_up_to_the_whole_in_any_order(isa: str) -> None:
    numel = 20 * kernels.STATS_BLOCK + 77
    grad = torch.randn(numel)
    whole = kernels.grad_stats(grad)
    for _ in range(5):
        parts = [kernels.grad_stats(grad[a:b]) for a, b in cuts(numel, 5, kernels.STATS_BLOCK)]
        order = torch.randperm(len(parts)).tolist()
        total = kernels.GradStats.of(())
        for index in order:
            total = total + parts[index]
        assert total.sum_squares == whole.sum_squares
        assert total.norm == whole.norm


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_broken_element_is_found_anywhere(isa: str, dtype: torch.dtype, value: float) -> None:
    numel = kernels.STATS_BLOCK + 45
    places = range(numel) if isa == "reference" else range(0, numel, 1)
    for place in itertools.chain(
        range(0, 70), list(places)[:: 997 if isa == "reference" else 61], [numel - 1]
    ):
        grad = torch.ones(numel, dtype=dtype)
        grad[place] = value
        stats = kernels.grad_stats(grad)
        assert not stats.finite, f"element {place}"
        assert not math.isfinite(stats.sum_squares)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_tiny_numbers_are_finite(isa: str, dtype: torch.dtype) -> None:
    """Squares that overflow or vanish in fp32 do neither in double."""
    info = torch.finfo(dtype)
    grad = torch.full((1000,), info.max, dtype=dtype)
    stats = kernels.grad_stats(grad)
    assert stats.finite
    assert stats.sum_squares == pytest.approx(1000 * float(info.max) ** 2, rel=1e-12)
    tiny = torch.full((1000,), float(info.smallest_normal) / 4, dtype=dtype)
    assert kernels.grad_stats(tiny).sum_squares == pytest.approx(
        1000 * float(tiny[0]) ** 2, rel=1e-12
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_addresses_do_not_matter(isa: str, dtype: torch.dtype) -> None:
    values = torch.randn(1003).to(dtype)
    assert kernels.grad_stats(misaligned(values)) == kernels.grad_stats(values)
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    target = misaligned(torch.zeros(1003, dtype=other))
    kernels.cast(misaligned(values), target)
    assert_same_bits(target, values.to(other), "cast")


def test_empty_gradient(isa: str) -> None:
    stats = kernels.grad_stats(torch.empty(0))
    assert stats.finite
    assert stats.sum_squares == 0.0


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_16_bit_number_survives_the_way_there_and_back(isa: str, half: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    wide = torch.empty(every.numel())
    kernels.cast(every, wide)
    assert_same_bits(wide, every.float(), "16 bits to fp32")
    back = torch.empty_like(every)
    kernels.cast(wide, back)
    assert_same_bits(back, every, "and back")


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_rounding_is_to_nearest_even(isa: str, half: torch.dtype) -> None:
    """Every 16-bit number, the middle to the next one, and the fp32 neighbours of both."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half).float()
    words = every.view(torch.int32)
    half_step = 1 << 15 if half == torch.bfloat16 else 1 << 12
    around = torch.cat(
        [
            (words + delta + middle).view(torch.float32)
            for delta in (-1, 0, 1)
            for middle in (0, half_step)
        ]
    )
    special = torch.tensor(SPECIAL)
    wide = torch.cat([around, special, torch.randn(1000) * 1e-7, torch.randn(1001) * 1e5])
    narrow = torch.empty(wide.numel(), dtype=half)
    kernels.cast(wide, narrow)
    assert_same_bits(narrow, wide.to(half), "rounding")
    assert torch.equal(torch.isnan(narrow), torch.isnan(wide)), (
        "NaN stays NaN, and nothing else becomes it"
    )


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_casts_give_the_same_bits_on_every_instruction_set(half: torch.dtype) -> None:
    wide = torch.from_numpy(
        np.random.default_rng(7).integers(0, 2**32, 100_003, dtype=np.uint32).view(np.float32)
    )
    natives = [name for name in ISAS if name != "reference"]
    results = []
    for name in natives:
        with kernels.forced_isa(name):
            narrow, back = torch.empty(wide.numel(), dtype=half), torch.empty(wide.numel())
            kernels.cast(wide, narrow)
            kernels.cast(narrow, back)
            results.append((narrow.view(torch.int16), back.view(torch.int32)))
    for narrow_bits, back_bits in results[1:]:  # NaN payloads included
        assert torch.equal(narrow_bits, results[0][0])
        assert torch.equal(back_bits, results[0][1])


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_casts_touch_only_what_is_theirs(isa: str, half: torch.dtype) -> None:
    for numel in (*range(50), *SIZES[:-1]):
        for shift in (0, 1, 5):
            source = awkward(numel)
            narrow = unaligned(torch.zeros(numel, dtype=half), shift)
            wide = unaligned(torch.zeros(numel), shift)
            kernels.cast(source, narrow)
            kernels.cast(narrow, wide)
            assert_same_bits(narrow, source.to(half), "cast")
            assert_same_bits(wide, source.to(half).float(), "cast back")
            assert_untouched_around(narrow, f"{numel} elements to {half}")
            assert_untouched_around(wide, f"{numel} elements from {half}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("native_isa", [name for name in ISAS if name != "reference"])
def test_one_sum_is_written_for_each_block(native_isa: str, dtype: torch.dtype) -> None:
    """The native call itself: `grad_stats` makes the memory for the sums out of sight."""
    block = kernels.STATS_BLOCK
    with kernels.forced_isa(native_isa):
        for numel in (0, 1, block - 1, block, block + 1, 3 * block, 3 * block + 31):
            grad = torch.ones(numel, dtype=dtype)
            sums = unaligned(torch.zeros(-(-numel // block), dtype=torch.float64), 1)
            code = calls._CODES[dtype]
            _native.block_sums(grad.data_ptr(), code, numel, sums.data_ptr(), 0)
            assert_untouched_around(sums, f"{numel} elements of {dtype}")
            assert sums.tolist() == [
                float(min(block, numel - begin)) for begin in range(0, numel, block)
            ]


def test_casts_refuse_what_they_do_not_do() -> None:
    for source, target, name in (
        (torch.zeros(3), torch.zeros(3), "target"),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float16), "target"),
        (torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.bfloat16), "source"),
        (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), "target"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            kernels.cast(source, target)
