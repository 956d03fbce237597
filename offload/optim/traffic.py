"""A traffic generator: chunks of noise that move between host memory and drives as state chunks do.

It is for measurements: the store, its checksums, the sizes and the buffers are those of a step,
without the update in between. `mix` is the step's own pipeline; `read` and `write` move in one
direction only. The swap files are unnamed, and their space is free when this is closed. One thread
at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.core.budget import Budget
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.core.timeline import DISK_READS, DISK_WRITES, busy_s
from offload.optim.pipeline import Pipeline
from offload.optim.staging import StagingBuffer
from offload.optim.tiers import HostChunk, Tiers
from offload.planning.layout import ELEMENT_BYTES, Chunk, ParamSpec, lay_out
from offload.planning.state_plan import Plan
from offload.storage.disk import DiskStore

FIELDS = ("exp_avg", "exp_avg_sq")
_SEED = 1


@dataclass(frozen=True)
class StateTrafficFigures:
    """A number of bytes that have moved. busy_s: seconds in which at least one operation was in
    flight.
    """

    read_bytes: int
    written_bytes: int
    busy_s: float

    def __add__(self, other: StateTrafficFigures) -> StateTrafficFigures:
        """Add two movements, one after the other."""
        return StateTrafficFigures(
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.busy_s + other.busy_s,
        )

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of both directions together; None: nothing has moved."""
        nbytes = self.read_bytes + self.written_bytes
        return nbytes / self.busy_s if nbytes and self.busy_s else None


def plan_traffic(nbytes: int, buffers: int, chunk_numel: int) -> Plan:
    """Plan `nbytes` in chunks of so many elements, which pass through so many buffers. The plan has
    `disk_bytes` only where there are more chunks than buffers.
    """
    element_bytes = ELEMENT_BYTES * len(FIELDS)
    noise = ParamSpec("noise", nbytes // element_bytes, FIELDS)
    chunks = lay_out([noise], chunk_numel)
    host_bytes = buffers * chunk_numel * element_bytes
    fits = sum(chunk.nbytes for chunk in chunks) <= host_bytes
    return Plan(
        params=(noise,),
        chunks=tuple(chunks),
        resident=frozenset(chunk.number for chunk in chunks if fits),
        buffers=0 if fits else buffers,
        staging_buffers=0,
        has_grad_buffers=False,
        host_memory_bytes=host_bytes,
    )


def always() -> bool:
    return True


class _Enough(Exception):
    """The exception that ends a pass early."""


class Traffic:
    """The chunks of a plan that are not resident, on these directories. `fill` comes first;
    `chunks` are those that it has filled. `keep_going`, an argument of its passes, is called before
    each chunk; a pass ends early when it returns False, and then nothing is in flight.
    """

    def __init__(self, plan: Plan, directories: Sequence[Path]) -> None:
        self.plan = plan
        self.metrics = Metrics()
        self.chunks: list[Chunk] = []
        self._pool = Pool(plan.arena_bytes, budget=Budget())
        try:
            self._store = DiskStore(
                directories,
                plan.disk_capacity_bytes,
                metrics=self.metrics,
                memory=[self._pool.buffer()],
            )
        except BaseException:
            self._pool.close()
            raise
        self._tiers = Tiers(plan, self._pool, self._store)
        self._pipeline = Pipeline(self._tiers, None, self.metrics)

    def close(self) -> None:
        """Wait for what is in flight and release everything. Idempotent."""
        self._store.close()
        self._pool.close()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def written_bytes(self) -> int:
        """The bytes written since the beginning: the wear of the drives."""
        return self.metrics.snapshot().counts.get("disk_written_bytes", 0)

    def fill(self, keep_going: Callable[[], bool] = always) -> StateTrafficFigures:
        """Write noise, because drives may write zeros faster than anything else."""
        generator = torch.Generator("cpu").manual_seed(_SEED)  # not torch's default generator

        def act(piece: HostChunk, staging_buffer: StagingBuffer | None) -> bool:
            if not keep_going():
                raise _Enough
            piece.memory.view(torch.int32).random_(generator=generator)
            self.chunks.append(piece.chunk)
            return True

        moving = [c for c in self.plan.chunks if c.number not in self.plan.resident]
        return self._pass(moving, act)

    def mix(
        self, keep_going: Callable[[], bool] = always, chunks: Sequence[Chunk] | None = None
    ) -> StateTrafficFigures:
        """Read chunks (None: all), and write each when it has arrived, as a step does."""

        def act(piece: HostChunk, staging_buffer: StagingBuffer | None) -> bool:
            if not keep_going():
                raise _Enough
            return True

        return self._pass(self.chunks if chunks is None else chunks, act)

    def _pass(
        self, chunks: Sequence[Chunk], act: Callable[[HostChunk, StagingBuffer | None], bool]
    ) -> StateTrafficFigures:
        begin_s = time.perf_counter()
        with suppress(_Enough):  # the pipeline has waited for all that was in flight
            self._pipeline.run(chunks, act)
        return self._moved_since(begin_s)

    def read(self, keep_going: Callable[[], bool] = always) -> StateTrafficFigures:
        """Read all chunks, without writes beside it."""
        self._settle()
        coming: deque[tuple[HostChunk, Ticket[None]]] = deque()

        def land() -> None:
            piece, ticket = coming.popleft()
            ticket.wait()
            self._tiers.give_back(piece)

        begin_s = time.perf_counter()
        for chunk in self.chunks:
            if not keep_going():
                break
            if not self._tiers.free_buffers:
                land()
            coming.append(self._tiers.read(chunk))
        while coming:
            land()
        return self._moved_since(begin_s)

    def write(self, keep_going: Callable[[], bool] = always) -> StateTrafficFigures:
        """Write all chunks, without reads beside it, from as many buffers."""
        self._settle()
        first = self.chunks[: self._tiers.free_buffers]
        arriving = [self._tiers.read(chunk) for chunk in first]
        going: deque[tuple[HostChunk, Ticket[None] | None]] = deque()
        for piece, ticket in arriving:
            ticket.wait()
            going.append((piece, None))
        begin_s = time.perf_counter()
        for chunk in self.chunks:
            if not keep_going():
                break
            piece, under_way = going.popleft()
            if under_way is not None:
                under_way.wait()
            memory = piece.whole[: chunk.nbytes // ELEMENT_BYTES]
            next_one = HostChunk(chunk, memory, piece.whole)
            going.append((next_one, self._tiers.write(next_one)))
        for piece, under_way in going:
            if under_way is not None:
                under_way.wait()
            self._tiers.give_back(piece)
        return self._moved_since(begin_s)

    def _settle(self) -> None:
        """Write back the chunks that are dirty in buffers."""
        for piece, ticket in [(piece, self._tiers.write(piece)) for piece in self._tiers.unwritten]:
            ticket.wait()
            self._tiers.give_back(piece)

    def _moved_since(self, begin_s: float) -> StateTrafficFigures:
        events = [e for e in self.metrics.events_since(begin_s) if e.begin_s >= begin_s]
        reads = [event for event in events if event.row == DISK_READS]
        writes = [event for event in events if event.row == DISK_WRITES]
        return StateTrafficFigures(
            sum(event.nbytes for event in reads),
            sum(event.nbytes for event in writes),
            busy_s([*reads, *writes]),
        )
