"""Chunks through few buffers: the update finds the newest bytes of each, also after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import StoreError
from offload.core.budget import Budget
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.optim.pipeline import Pipeline
from offload.optim.staging import NO_STAGING, StagingBuffer
from offload.optim.tiers import HostChunk, Tiers
from offload.planning.layout import Chunk, ParamSpec, lay_out
from offload.planning.state_plan import Plan
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]
CHUNKS, BUFFERS, NUMEL = 12, 3, 1024


class InOneDirection:
    """A staging stand-in that takes the chunks by number; no chunk needs a staging buffer."""

    def in_order(self, chunks: Sequence[Chunk], at_hand: AbstractSet[int]) -> Sequence[Chunk]:
        return sorted(chunks, key=lambda chunk: chunk.number)

    def needs(self, chunk: Chunk) -> bool:
        return False


class Counted:
    """The tiers on a drive, and the value that each chunk must hold: how often it was added to."""

    def __init__(self, tiers: Tiers, store: DiskStore) -> None:
        self.tiers, self.store = tiers, store
        self.places: Any = NO_STAGING
        self.metrics = Metrics()
        self.expected = [0.0] * CHUNKS

    def add(self, numbers: range) -> None:
        """Add one to each element of these chunks, and count each chunk that has changed."""

        def act(piece: HostChunk, _: StagingBuffer | None) -> bool:
            piece.memory.add_(1.0)
            self.expected[piece.chunk.number] += 1.0
            return True

        self._run(numbers, act)

    def check(self) -> None:
        seen = {}

        def act(piece: HostChunk, _: StagingBuffer | None) -> bool:
            assert (piece.memory == piece.memory[0]).all()
            seen[piece.chunk.number] = float(piece.memory[0])
            return False

        self._run(range(CHUNKS), act)
        assert seen == dict(enumerate(self.expected))

    def _run(self, numbers: range, act: object) -> None:
        chunks = [self.tiers.plan.chunks[number] for number in numbers]
        Pipeline(self.tiers, self.places, self.metrics).run(chunks, act)  # type: ignore[arg-type]
        buffers = len(self.tiers.free) + len(self.tiers.unwritten)
        assert buffers == BUFFERS, "every buffer is free, or holds the newest bytes of a chunk"


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    spec = ParamSpec("p", CHUNKS * NUMEL, ("m",))
    chunks = tuple(lay_out([spec], NUMEL))
    plan = Plan((spec,), chunks, frozenset(), BUFFERS, 0, False, BUFFERS * NUMEL * 4)
    assert plan.buffers == BUFFERS and len(plan.chunks) == CHUNKS and not plan.resident
    with (
        Pool(plan.arena_bytes, budget=Budget()) as pool,
        DiskStore([tmp_path], plan.disk_capacity_bytes) as store,
    ):
        tiers = Tiers(plan, pool, store)
        yield Counted(tiers, store)
        del tiers


def moved(store: DiskStore) -> tuple[int, int]:
    used = store.stats()
    return used.read_bytes, used.written_bytes


def test_what_is_in_a_buffer_is_not_read_and_not_written(counted: Counted) -> None:
    counted.add(range(CHUNKS))
    for _ in range(3):
        before = moved(counted.store)
        counted.add(range(CHUNKS))
        after = moved(counted.store)
        planned = (CHUNKS - BUFFERS) * NUMEL * 4
        assert counted.tiers.plan.step_read_bytes == planned
        assert (after[0] - before[0], after[1] - before[1]) == (planned, planned)
    counted.add(range(9, 12))
    before = moved(counted.store)
    counted.add(range(9, 12))
    assert moved(counted.store) == before, "they all are in buffers"
    counted.check()


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "places", [NO_STAGING, InOneDirection()], ids=["at hand first", "by number"]
)
def test_any_order_finds_the_newest(counted: Counted, seed: int, places: Any) -> None:
    counted.places = places
    generator = torch.Generator().manual_seed(seed)
    for _ in range(12):
        begin, end = sorted(torch.randint(0, CHUNKS + 1, (2,), generator=generator).tolist())
        counted.add(range(begin, end))
        if not torch.randint(0, 3, (), generator=generator):
            counted.check()
    counted.check()


@pytest.mark.parametrize("nth", range(1, CHUNKS + 1))
@pytest.mark.parametrize("forever", [False, True])
def test_a_failure_while_reading_all_loses_nothing(
    counted: Counted, nth: int, forever: bool
) -> None:
    """Unwritten chunks must be written to make room; where a write fails, the chunk stays."""
    counted.add(range(CHUNKS))
    counted.add(range(4, CHUNKS))
    counted.store.engine.inject(Fault(FaultKind.ERROR, nth, forever))
    with pytest.raises(StoreError):  # each chunk is read or written
        counted.check()
    counted.store.engine.inject(Fault(FaultKind.ERROR, nth=1 << 30))
    counted.check()
    counted.add(range(CHUNKS))
    counted.check()


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("error", [KeyboardInterrupt, StoreError("refused")])
def test_a_write_that_does_not_begin_loses_nothing(
    counted: Counted, nth: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a refusal, comes when a chunk is handed to the store."""
    counted.add(range(CHUNKS))
    for numbers in (range(CHUNKS), range(6)):
        counted.add(range(CHUNKS))
        calls, write = [], DiskStore.write

        def fail(*given: Any, calls: list[int] = calls, write: Any = write, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == nth:
                raise error
            return write(*given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "write", fail)
            try:
                counted._run(numbers, lambda *_: False)
            except (KeyboardInterrupt, StoreError):
                assert len(calls) == nth
        buffers = len(counted.tiers.free) + len(counted.tiers.unwritten)
        assert buffers == BUFFERS
        counted.check()
