"""The CRC-32 of checkpoints is zlib's, on every instruction set."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import zlib
from typing import Any

import numpy as np
import pytest

from offload import _native as native
from offload import kernels
from offload.checkpoint.format import manifest
from offload.core.errors import ConfigError

pytestmark = pytest.mark.kernels

ISAS = native.isas()
AWKWARD = (
    *range(301),
    *(near + by for near in (512, 1024, 4096, 65536) for by in (-65, -17, -1, 0, 1, 15, 63, 65)),
    3_000_017,
)


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(3_100_000)


def test_every_set_is_there() -> None:
    assert kernels.native_error() is None
    assert "scalar" in ISAS


@pytest.mark.parametrize("isa", ISAS)
def test_all_sizes_and_beginnings(isa: str, data: bytes) -> None:
    whole = memoryview(data)
    for nbytes in AWKWARD:
        for shift in (0, 1, 7, 15, 31, 63) if nbytes > 300 else (nbytes % 67, 3):
            piece = whole[shift : shift + nbytes]
            assert native.crc32(piece, 0, isa) == zlib.crc32(piece), (nbytes, shift)


@pytest.mark.parametrize("isa", ISAS)
def test_every_beginning_of_a_line(isa: str, data: bytes) -> None:
    for shift in range(129):
        for nbytes in (64, 255, 256, 257, 1000):
            piece = memoryview(data)[shift : shift + nbytes]
            assert native.crc32(piece, 0, isa) == zlib.crc32(piece), (nbytes, shift)


@pytest.mark.parametrize("isa", ISAS)
def test_pieces_are_added_one_by_one(isa: str, data: bytes) -> None:
    draw = random.Random(2)
    for _ in range(50):
        length = draw.choice([10, 300, 5000, 200_000])
        expected = zlib.crc32(data[:length])
        done, value = 0, 0
        while done < length:
            step = draw.choice([0, 1, 15, 16, 63, 64, 65, 256, 300, 4096, length])
            value = native.crc32(memoryview(data)[done : min(length, done + step)], value, isa)
            done += step
        assert value == expected
        begin = draw.getrandbits(32)
        assert native.crc32(data[:length], begin, isa) == zlib.crc32(data[:length], begin)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("byte", [0, 0xFF])
def test_equal_bytes_of_every_length(isa: str, byte: int) -> None:
    data = bytes([byte]) * 2000
    for nbytes in range(2000):
        assert native.crc32(data[:nbytes], 0, isa) == zlib.crc32(data[:nbytes])


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
def test_the_environment_forces_a_set(isa: str, data: bytes) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from offload.checkpoint.format import manifest\n"
        "print(manifest._choose()[1], manifest._choose()[0] is None, manifest.crc32(b'123456789'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OFFLOAD_ISA": isa},
        capture_output=True,
        text=True,
        timeout=60,
    )
    shown = f" True {0xCBF43926}" if isa == "reference" else f"{isa} False {0xCBF43926}"
    assert done.stdout.rstrip("\n") == shown, done.stderr


def test_an_unknown_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ISA", "abacus")
    manifest._choose.cache_clear()
    try:
        with pytest.raises(ConfigError, match="'abacus' is not available here, only"):
            manifest.crc32(b"")
    finally:
        manifest._choose.cache_clear()


def test_without_the_native_core_zlib_computes_it(
    monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setitem(sys.modules, "offload._native", None)
    monkeypatch.delattr("offload._native")
    manifest._choose.cache_clear()
    try:
        assert manifest._choose() == (None, "")
        assert manifest.crc32(data, 5) == zlib.crc32(data, 5)
    finally:
        manifest._choose.cache_clear()


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda b: np.frombuffer(b, np.uint8),
        lambda b: np.frombuffer(b),
    ],
)
def test_anything_like_bytes_will_do(make: Any, data: bytes) -> None:
    assert manifest.crc32(make(data[:8000]), -1) == zlib.crc32(data[:8000], -1)


@pytest.mark.parametrize("wrong", ["text", 3, None, [1], memoryview(b"abcd")[::2]])
def test_what_is_not_like_bytes_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, BufferError)):
        manifest.crc32(wrong)


def test_threads_at_once(data: bytes) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(manifest.crc32(data)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [zlib.crc32(data)] * 4
