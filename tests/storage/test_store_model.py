"""Stores against a model: a dictionary of bytes, with any acts in any order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.loops import chosen, tally
from support.memory_store import MemoryStore
from support.stores import (
    BLOCK,
    ENGINES,
    HANG_S,
    KIB,
    MIB,
    PIECE,
    memory_at,
    nbytes_of,
    open_store,
    random_bytes,
    read,
    write,
)

from offload.core.drive_facts import DirectIo
from offload.core.errors import CapacityError, StateError
from offload.storage.engine import Fault, FaultKind
from offload.storage.files import System

CAPACITY = 384 * KIB
NAMES = [f"layer.{i}.weight" for i in range(5)]
# Around blocks, pieces and sectors; primes; now and then whole pieces and more.
EDGES = [0, 1, 2, 3, 511, 512, 513, 4095, 4096, 4097, 8191, 12289, PIECE - 1, PIECE, PIECE + 1]
SIZES = st.one_of(
    st.sampled_from(EDGES),
    st.integers(1, 20_000),
    st.sampled_from([65537, 3 * PIECE - 1, 5 * PIECE, 7 * PIECE + 13]),
)
SEEDS = st.integers(0, 1000)
BATCH = st.lists(
    st.tuples(st.sampled_from(["write", "write", "read", "free"]), st.integers(0, 1), SIZES),
    max_size=6,
)


class Machine(RuleBasedStateMachine):
    """A state machine: `held` has the bytes of each name by generation; `pinned` those of each
    snapshot.
    """

    snapshots = Bundle("snapshots")

    def __init__(self, make: Callable[[], Any], align: int) -> None:
        super().__init__()
        self.store = make()
        self.align = align
        self.held: dict[str, tuple[int, bytes]] = {}
        self.pinned: dict[int, dict[str, tuple[int, bytes]]] = {}
        self.handles: dict[int, Any] = {}
        self.taken = 0
        tally("hypothesis examples")

    def room(self, nbytes: int) -> int:
        return -(-nbytes // self.align) * self.align

    def used(self) -> int:
        kept = {g: len(d) for g, d in self.held.values()}
        for chunks in self.pinned.values():
            kept |= {generation: len(data) for generation, data in chunks.values()}
        return sum(self.room(nbytes) for nbytes in kept.values())

    def note(self, name: str, data: bytes) -> None:
        generation = self.store.generation_of(name)
        assert generation > self.held.get(name, (0, b""))[0]
        self.held[name] = generation, data

    @rule(name=st.sampled_from(NAMES), nbytes=SIZES, seed=SEEDS)
    def write(self, name: str, nbytes: int, seed: int) -> None:
        """Write a generation, which lies beside the old one."""
        data = random_bytes(nbytes, seed)
        if self.used() + self.room(nbytes) > CAPACITY:
            with pytest.raises(CapacityError, match=name):
                self.store.write(name, data)
            return
        write(self.store, name, data)
        self.note(name, data.tobytes())

    @rule(name=st.sampled_from(NAMES))
    def read(self, name: str) -> None:
        if name not in self.held:
            with pytest.raises(StateError, match=name):
                self.store.read(name, bytearray(1))
            return
        assert read(self.store, name).tobytes() == self.held[name][1]

    @rule(name=st.sampled_from(NAMES))
    def free(self, name: str) -> None:
        if name not in self.held:
            with pytest.raises(StateError, match=name):
                self.store.free(name)
            return
        self.store.free(name)
        del self.held[name]

    @rule(target=snapshots, names=st.none() | st.sets(st.sampled_from(NAMES)))
    def snapshot(self, names: set[str] | None) -> int:
        wanted = None if names is None else sorted(names & set(self.held))
        self.taken += 1
        handle = self.store.snapshot(wanted)
        self.handles[self.taken] = handle
        self.pinned[self.taken] = {
            n: self.held[n] for n in (self.held if wanted is None else wanted)
        }
        assert handle.generations == {n: g for n, (g, _) in self.pinned[self.taken].items()}
        return self.taken

    @rule(number=snapshots)
    def read_snapshot(self, number: int) -> None:
        for name, (_, data) in self.pinned[number].items():
            target = bytearray(len(data))
            self.handles[number].read(name, target).wait(HANG_S)
            assert target == data

    @rule(number=consumes(snapshots), politely=st.booleans())
    def release(self, number: int, politely: bool) -> None:
        handle = self.handles.pop(number)
        del self.pinned[number]
        if politely:
            handle.release()
        else:
            del handle
            gc.collect()

    @precondition(lambda self: self.used() < CAPACITY // 4)
    @rule(batches=st.lists(BATCH, min_size=2, max_size=4), seed=SEEDS)
    def at_once(self, batches: list[list[tuple[str, int, int]]], seed: int) -> None:
        """Write from threads with two names each, and one more that all of them write."""
        sizes = [nbytes for batch in batches for _, _, nbytes in batch]
        if sum(map(self.room, sizes)) + 4 * BLOCK > CAPACITY // 2:
            return
        owned = [
            {n: d for n, (_, d) in self.held.items() if n.startswith(f"{number}.")}
            for number in range(len(batches))
        ]
        with ThreadPoolExecutor(len(batches)) as threads:
            jobs = zip(range(len(batches)), batches, owned, strict=True)
            ends = [threads.submit(self.work, *job, seed) for job in jobs]
            for end in ends:
                end.result(HANG_S)
        for number, found in enumerate(owned):
            self.held = {n: v for n, v in self.held.items() if not n.startswith(f"{number}.")}
            for name, data in found.items():
                self.held[name] = self.store.generation_of(name), data
        common = read(self.store, "common").tobytes()
        assert common in {bytes([number]) * 3000 for number in range(len(batches))}
        self.held["common"] = self.store.generation_of("common"), common

    def work(self, number: int, batch: Any, found: dict[str, bytes], seed: int) -> None:
        tickets = [self.store.write("common", np.full(3000, number, dtype=np.uint8))]
        for step, (what, which, nbytes) in enumerate(batch):
            name = f"{number}.{which}"
            if what == "write":
                data = random_bytes(nbytes, seed + step)
                write(self.store, name, data)
                found[name] = data.tobytes()
            elif name in found and what == "read":
                assert read(self.store, name).tobytes() == found[name]
            elif name in found:
                self.store.free(name)
                del found[name]
        tickets[0].wait(HANG_S)

    @invariant()
    def same_as_the_model(self) -> None:
        stats = self.store.stats()
        assert self.store.names() == sorted(self.held)
        assert (stats.used_bytes, stats.chunks) == (self.used(), len(self.held))
        assert stats.used_bytes <= stats.peak_bytes <= CAPACITY
        for name, (generation, data) in self.held.items():
            assert self.store.generation_of(name) == generation
            assert nbytes_of(self.store, name) == len(data)

    def teardown(self) -> None:
        for name, (_, data) in self.held.items():
            assert read(self.store, name).tobytes() == data
        for handle in self.handles.values():
            handle.release()
        for name in self.store.names():
            self.store.free(name)
        assert self.store.stats().used_bytes == 0
        self.store.close()


def run(make: Callable[[], Any], align: int, examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Machine(make, align),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )


def folders(tmp_path: Path, count: int) -> list[Path]:
    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.parametrize("directories", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_store_is_like_its_model(engine: str, directories: int, tmp_path: Path) -> None:
    paths = folders(tmp_path, directories)
    run(
        lambda: open_store(paths, engine, capacity_bytes=CAPACITY, piece_bytes=PIECE, depth=4),
        BLOCK,
        examples=chosen(test=3, torture=80),
    )


def test_a_memory_store_is_like_its_model() -> None:
    run(lambda: MemoryStore(CAPACITY), 1, examples=chosen(test=5, torture=100))


@pytest.mark.parametrize("engine", ENGINES)
def test_large_and_odd_sizes(engine: str, tmp_path: Path) -> None:
    """One byte to many pieces, primes and whole pieces and one more and one less, in two
    directories.
    """
    largest = chosen(test=8 * MIB, torture=64 * MIB)
    sizes = [1, 65537, MIB - 1, MIB + 1, 3_145_739, largest // 4 + 4095, largest]
    paths = folders(tmp_path, 2)
    with open_store(paths, engine, capacity_bytes=2 * largest + 16 * MIB) as store:
        tickets = []
        source = random_bytes(largest + 7, 1)
        for begin, nbytes in enumerate(sizes):
            tickets.append(store.write(f"w{nbytes}", source[begin : begin + nbytes]))
        for ticket in tickets:
            ticket.wait(HANG_S)
        for begin, nbytes in enumerate(sizes):
            assert (read(store, f"w{nbytes}") == source[begin : begin + nbytes]).all()
        stats = store.stats()
        assert stats.written_bytes == stats.read_bytes == sum(sizes)
        assert stats.used_bytes == sum(-(-nbytes // BLOCK) * BLOCK for nbytes in sizes)


@pytest.mark.parametrize("nbytes", [1, 513, 4097, 3 * PIECE + 7])
@pytest.mark.parametrize("engine", ENGINES)
def test_through_the_page_cache(engine: str, tmp_path: Path, nbytes: int) -> None:
    """Without O_DIRECT nothing is aligned and nothing padded; that is a fall-back."""

    class Cached(System):
        def probe_direct_io(self, fd: int) -> DirectIo:
            return DirectIo(False)

    with open_store(tmp_path, engine, system=Cached(), piece_bytes=PIECE) as store:
        assert "no O_DIRECT" in " ".join(store.metrics.snapshot().fallbacks.values())
        source = random_bytes(nbytes, 1)
        write(store, "w", source)
        assert (read(store, "w") == source).all()
        store.engine.inject(Fault(FaultKind.SHORT_HALF, nth=1))
        if nbytes > 1:
            assert (read(store, "w") == source).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_on_tmpfs(engine: str) -> None:
    with open_store("/dev/shm", engine) as store:
        for nbytes in (1, 4097, MIB + 1):
            source = random_bytes(nbytes, nbytes)
            write(store, "w", source)
            assert (read(store, "w") == source).all()


def test_registered_memory(tmp_path: Path) -> None:
    """Chunks inside, outside and across the border of what the ring knows."""
    arena = memory_at(0, 64 * KIB)
    with open_store(tmp_path, "io_uring", memory=[arena[: 32 * KIB]], piece_bytes=PIECE) as store:
        assert not store.metrics.snapshot().fallbacks
        for begin, nbytes in ((0, 32 * KIB), (40 * KIB, 8 * KIB), (24 * KIB, 16 * KIB), (1, 700)):
            source = random_bytes(nbytes, begin)
            write(store, "w", source)
            store.read("w", arena[begin : begin + nbytes]).wait(HANG_S)
            assert (arena[begin : begin + nbytes] == source).all()
            write(store, "v", arena[begin : begin + nbytes])
            assert (read(store, "v") == source).all()
