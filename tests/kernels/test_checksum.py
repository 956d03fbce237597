"""The checksum of swapped bytes: one value on every instruction set, and no small change unseen."""

from __future__ import annotations

import numpy as np
import pytest
from support.stores import Bytes, memory_at, random_bytes

from offload import _native as native
from offload import kernels

pytestmark = pytest.mark.kernels

STRIPE = 128  # bytes that are taken in one step
ISAS = native.isas()


def sum_of(data: Bytes, isa: str = "") -> int:
    return int(native.checksum(data.ctypes.data, data.nbytes, isa))


def is_seen(data: Bytes, spoilt: Bytes) -> bool:
    return sum_of(data) != sum_of(spoilt)


def test_every_instruction_set_has_the_same_value() -> None:
    assert kernels.native_error() is None
    assert "scalar" in ISAS
    for nbytes in (*range(301), 4095, 4096, 4097, 100_003, 1 << 20):
        for shift in (0, 1, 3) if nbytes > 300 else (nbytes % 5,):
            data = memory_at(shift, nbytes)
            data[:] = random_bytes(nbytes, nbytes)
            values = {isa: sum_of(data, isa) for isa in ISAS}
            assert len({*values.values(), sum_of(data)}) == 1, (nbytes, shift, values)


def test_the_value_does_not_depend_on_the_address() -> None:
    data = random_bytes(1000, 1)
    values = set()
    for shift in range(64):
        moved = memory_at(shift, 1000)
        moved[:] = data
        values.add(sum_of(moved))
    assert len(values) == 1


def test_nothing_behind_the_end_counts() -> None:
    area = random_bytes(1000, 1)
    before = sum_of(area[:501])
    area[501:] ^= 0xFF
    assert sum_of(area[:501]) == before


@pytest.mark.parametrize("nbytes", [1, 3, 4, 7, 31, 32, 33, 64, 127, 128, 129, 255, 300, 513])
def test_every_single_bit_counts(nbytes: int) -> None:
    data = random_bytes(nbytes, nbytes)
    values = {sum_of(data)}
    for bit in range(8 * nbytes):
        spoilt = data.copy()
        spoilt[bit // 8] ^= 1 << bit % 8
        values.add(sum_of(spoilt))
    assert len(values) == 8 * nbytes + 1, "two of these differ by two bits at most"


def test_every_pair_of_bits_counts() -> None:
    """Two bits anywhere in a small buffer: one word, two lanes, or one lane in two steps."""
    for data in (np.zeros(40, dtype=np.uint8), random_bytes(40, 1)):
        values = {sum_of(data)}
        for first in range(320):
            for second in range(first):
                spoilt = data.copy()
                for bit in (first, second):
                    spoilt[bit // 8] ^= 1 << bit % 8
                values.add(sum_of(spoilt))
        assert len(values) == 1 + 320 * 319 // 2


def test_pairs_of_bits_in_the_same_lane_count() -> None:
    """The plain sum alone misses bits that are flipped opposite ways; the mixed state does not."""
    rng = np.random.default_rng(1)
    for _ in range(10_000):
        data = rng.integers(0, 256, 4 * STRIPE, dtype=np.uint8)
        byte, bit = int(rng.integers(STRIPE)), int(rng.integers(8))
        first, second = rng.choice(4, 2, replace=False)
        spoilt = data.copy()
        spoilt[[first * STRIPE + byte, second * STRIPE + byte]] ^= 1 << bit
        assert is_seen(data, spoilt)


def test_bursts_of_32_bits_count() -> None:
    rng = np.random.default_rng(2)
    data = random_bytes(1024, 2)
    for _ in range(20_000):
        burst = int(rng.integers(1, 1 << 32))
        begin = int(rng.integers(8 * 1024 - 32))
        mask = np.frombuffer((burst << begin % 8).to_bytes(5, "little"), dtype=np.uint8)
        spoilt = data.copy()
        spoilt[begin // 8 : begin // 8 + 5] ^= mask[: 1024 - begin // 8]
        assert is_seen(data, spoilt)


@pytest.mark.parametrize("value", [0, 0xFF])
def test_lengths_of_equal_bytes_differ(value: int) -> None:
    data = np.full(20_000, value, dtype=np.uint8)
    values = {sum_of(data[:nbytes]) for nbytes in range(20_000)}
    assert len(values) == 20_000


def test_blocks_that_change_places_are_seen() -> None:
    """Words, lanes, steps and pages: all that may move as a whole."""
    rng = np.random.default_rng(3)
    for unit in (1, 4, 32, STRIPE, 512, 4096):
        data = random_bytes(16 * 4096, unit)
        for _ in range(300):
            first, second = rng.choice(len(data) // unit, 2, replace=False) * unit
            spoilt = data.copy()
            spoilt[first : first + unit] = data[second : second + unit]
            spoilt[second : second + unit] = data[first : first + unit]
            if (spoilt != data).any():
                assert is_seen(data, spoilt)


def test_zeroed_and_repeated_blocks_are_seen() -> None:
    data = random_bytes(16 * 4096, 4)
    values = {sum_of(data)}
    for page in range(16):
        for other in (np.zeros(4096, dtype=np.uint8), data[:4096], data[4096:8192]):
            spoilt = data.copy()
            spoilt[page * 4096 : (page + 1) * 4096] = other
            values.add(sum_of(spoilt))
    assert len(values) == 1 + 16 * 3 - 2, "two of them change nothing"


def test_values_are_spread_over_all_bits() -> None:
    """Each bit of the result changes about every second time when one bit of the data does."""
    data = random_bytes(4096, 5)
    before = sum_of(data)
    changed = np.zeros(64)
    for bit in range(0, 8 * 4096, 16):
        spoilt = data.copy()
        spoilt[bit // 8] ^= 1 << bit % 8
        difference = before ^ sum_of(spoilt)
        changed += [(difference >> i) & 1 for i in range(64)]
    share = changed / 2048
    assert share.min() > 0.4, share
    assert share.max() < 0.6, share
