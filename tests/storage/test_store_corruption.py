"""Bytes that were spoilt in the file are never handed over, and good ones are never suspected."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.loops import chosen, tally
from support.stores import (
    BLOCK,
    ENGINES,
    HEALTHY,
    KIB,
    MIB,
    PIECE,
    PinningStore,
    flip_bit,
    open_store,
    peek,
    places,
    poke,
    random_bytes,
    read,
    write,
)

from offload.core.errors import CorruptionError, StoreError
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind

NBYTES = 4 * PIECE + 777
NAMES = ("layer.0", "layer.1")
ROUNDS = chosen(test=30, torture=2000)


@pytest.fixture(params=ENGINES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PinningStore]:
    with open_store(tmp_path, request.param, capacity_bytes=512 * KIB, piece_bytes=PIECE) as store:
        for seed, name in enumerate(NAMES):
            write(store, name, random_bytes(NBYTES, seed))
        yield store
        for name in store.names():
            store.free(name)
        assert store.stats().used_bytes == 0


def begin_of(store: DiskStore, name: str) -> int:
    ((_, begin, _),) = places(store, name)
    return begin


def assert_caught(store: DiskStore, name: str, at: int) -> None:
    """Check that the read is refused. at: a byte of the chunk that is wrong; the error names the
    piece it is in.
    """
    with pytest.raises(CorruptionError, match=r"is not what was written; .*do not trust") as caught:
        read(store, name)
    error = caught.value
    assert (error.errno, error.operation, error.tensor) == (errno.EBADMSG, "read", name)
    assert error.file == store._files[0].label
    assert error.offset_bytes == begin_of(store, name) + at // PIECE * PIECE


def assert_good(store: DiskStore) -> None:
    for seed, name in enumerate(NAMES):
        assert (read(store, name) == random_bytes(NBYTES, seed)).all()


@contextmanager
def spoilt(store: DiskStore, name: str, begin: int, data: bytes) -> Iterator[None]:
    """Keep other bytes in the file while the block runs, `begin` behind the chunk's begin."""
    offset = begin_of(store, name) + begin
    before = peek(store, 0, offset, len(data))
    assert before != data, "nothing would be wrong"
    poke(store, 0, offset, data)
    yield
    poke(store, 0, offset, before)


@pytest.mark.quick
def test_single_bits(store: DiskStore, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = [0, 7, 8 * PIECE - 1, 8 * PIECE, 8 * (NBYTES - 1), 8 * NBYTES - 1]
    bits += [
        int(bit) for bit in rng.integers(0, 8 * NBYTES, chosen(test=150, torture=10_000, quick=20))
    ]
    for bit in bits:
        flip_bit(store, "layer.0", bit)
        assert_caught(store, "layer.0", bit // 8)
        flip_bit(store, "layer.0", bit)
    assert_good(store)
    tally("planted faults", len(bits))


def test_zeroed_pages(store: DiskStore, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tally("planted faults", ROUNDS)
    for _ in range(ROUNDS):
        page = int(rng.integers(-(-NBYTES // BLOCK))) * BLOCK
        with spoilt(store, "layer.0", page, bytes(BLOCK)):
            assert_caught(store, "layer.0", page)
    assert_good(store)


def test_a_chunk_of_zeros_that_is_full_of_something(store: DiskStore) -> None:
    write(store, "zeros", np.zeros(2 * PIECE, dtype=np.uint8))
    for begin in (0, PIECE):
        with spoilt(store, "zeros", begin, b"\1" * BLOCK):
            assert_caught(store, "zeros", begin)
    assert not read(store, "zeros").any()


def test_what_fills_the_last_block_does_not_count(store: DiskStore) -> None:
    """No bytes of a chunk lie there, so this is no corruption."""
    with spoilt(store, "layer.0", NBYTES, b"\xff" * (BLOCK - 777)):
        assert_good(store)


def test_swapped_chunks(store: DiskStore, seed: int) -> None:
    """Two of the same size, whole or a page of each; and pages within one chunk."""
    rng = np.random.default_rng(seed)
    raw = {name: peek(store, 0, begin_of(store, name), NBYTES) for name in NAMES}
    tally("planted faults", ROUNDS)
    for i in range(ROUNDS):
        first = int(rng.integers(4 * PIECE // BLOCK)) * BLOCK if i % 2 else 0
        nbytes = BLOCK if i % 2 else NBYTES
        part = {name: raw[name][first : first + nbytes] for name in NAMES}
        with (
            spoilt(store, "layer.0", first, part["layer.1"]),
            spoilt(store, "layer.1", first, part["layer.0"]),
        ):
            for name in NAMES:
                with pytest.raises(CorruptionError):
                    read(store, name)
            if i % 2:
                assert_caught(store, "layer.0", first)
    assert_good(store)
    pages = [raw["layer.0"][at : at + BLOCK] for at in (0, 5 * BLOCK)]
    with (
        spoilt(store, "layer.0", 0, pages[1]),
        spoilt(store, "layer.0", 5 * BLOCK, pages[0]),
        pytest.raises(CorruptionError),
    ):
        read(store, "layer.0")
    assert_good(store)


def test_lost_writes(store: DiskStore, seed: int) -> None:
    """The drive says that it has written and has not: what lay there before is still there."""
    rng = np.random.default_rng(seed)
    tally("planted faults", ROUNDS)
    for i in range(ROUNDS):
        store.engine.inject(Fault(FaultKind.LOST_WRITE, nth=int(rng.integers(1, 6))))
        write(store, "victim", random_bytes(NBYTES, 1000 + i))
        assert store.engine.attempts() == 5
        store.engine.inject(HEALTHY)
        with pytest.raises(CorruptionError):
            read(store, "victim")
    write(store, "victim", random_bytes(NBYTES, 1))
    assert (read(store, "victim") == random_bytes(NBYTES, 1)).all()


def test_old_bytes_in_the_place_of_new_ones(store: DiskStore, seed: int) -> None:
    """The generation before, of the same size, right where the new one should be."""
    rng = np.random.default_rng(seed)
    old = random_bytes(NBYTES, 1000)
    tally("planted faults", ROUNDS)
    for i in range(ROUNDS):
        new = random_bytes(NBYTES, 1001 + i)
        write(store, "victim", new)
        piece = int(rng.integers(5)) * PIECE
        nbytes = min(PIECE, NBYTES - piece)
        with spoilt(store, "victim", piece, old[piece : piece + nbytes].tobytes()):
            assert_caught(store, "victim", piece)
        old = new
    assert (read(store, "victim") == old).all()


def test_truncation(store: DiskStore, seed: int) -> None:
    """Cut short, and then grown again with zeros."""
    rng = np.random.default_rng(seed)
    fd, whole = store._files[0].fd, os.fstat(store._files[0].fd).st_size
    last = max(NAMES, key=lambda name: begin_of(store, name))
    begin = begin_of(store, last)
    raw = peek(store, 0, begin, NBYTES)
    rounds = ROUNDS if store.engine.name != "aiofiles" else ROUNDS // 4  # it is slow to give up
    tally("planted faults", rounds)
    for _ in range(rounds):
        left = int(rng.integers(NBYTES))
        os.ftruncate(fd, begin + left)
        with pytest.raises(StoreError, match=r"ENODATA.*was it cut short\?") as caught:
            read(store, last)
        assert caught.value.errno == errno.ENODATA
        assert caught.value.offset_bytes is not None
        os.ftruncate(fd, whole)
        if any(raw[left:]):
            with pytest.raises(CorruptionError):
                read(store, last)
        poke(store, 0, begin, raw)
    assert_good(store)


def test_snapshots_are_checked_too(store: PinningStore) -> None:
    with store.snapshot() as snapshot:
        flip_bit(store, "layer.0", 12345)
        write(store, "layer.0", random_bytes(NBYTES, 0))
        assert_good(store)
        with pytest.raises(CorruptionError):
            snapshot.read("layer.0", bytearray(NBYTES)).wait()
        target = bytearray(NBYTES)
        snapshot.read("layer.1", target).wait()
        assert target == random_bytes(NBYTES, 1).tobytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_false_alarm(engine: str, tmp_path: Path) -> None:
    """Large and small, old and new: in torture two gigabytes in all engines together."""
    largest = chosen(test=8 * MIB, torture=64 * MIB)
    with open_store(tmp_path, engine, capacity_bytes=2 * largest + 12 * MIB) as store:
        source = random_bytes(largest + 13, 1)
        target = np.empty_like(source)
        total = 0
        for i in range(4):
            large = source[i : largest - i]
            tickets = [store.write("large", large)]
            for j in range(20):
                tickets.append(store.write(f"small {j}", source[j : 100 * i + 4096 * j + 1]))
            for ticket in tickets:
                ticket.wait()
            for _ in range(3):
                store.read("large", target[: large.nbytes]).wait()
                total += large.nbytes
            assert (target[: large.nbytes] == large).all()
            for j in range(20):
                assert (read(store, f"small {j}") == source[j : 100 * i + 4096 * j + 1]).all()
        assert total * len(ENGINES) > chosen(test=250_000_000, torture=2_000_000_000)
