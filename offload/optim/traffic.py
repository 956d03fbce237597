"""A traffic generator: chunks of noise that move between host memory and drives as state chunks do.

It is for measurements: the store, its checksums, the sizes and the buffers are those of a step,
without the update in between. `mix` is the step's own pipeline; `read` and `write` move in one
direction only. The swap files are unnamed, and their space is free when this is closed. One thread
at a time.

`measure` is the short form that `wrap` makes on request: chunks pass through the pipeline without
any work on them, then AdamW's kernel runs on memory of its own. Neither takes more memory or disk
space than the plan would; both have released it when they return.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload import kernels
from offload.core.budget import Budget
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.core.timeline import DISK_READS, DISK_WRITES, busy_s
from offload.kernels import rules
from offload.optim.pipeline import Pipeline
from offload.optim.staging import NO_STAGING, StagingBuffer
from offload.optim.tiers import HostChunk, Tiers
from offload.planning.layout import ELEMENT_BYTES, Chunk, ParamSpec, lay_out
from offload.planning.state_plan import Plan, Speeds
from offload.storage.disk import DiskStore

FIELDS = ("exp_avg", "exp_avg_sq")
_SEED = 1
DISK_BYTES = 192 << 20  # written, then read and written again
TENSORS = 2 + len(FIELDS)  # in an update: parameter, gradient and states
_CHUNK_BYTES = 8 << 20
_UPDATE_NUMEL = 8 << 20  # 128 MiB: more than a cache holds
_UPDATES = 5
_ROUND_NUMEL = 1024  # a field's size is a multiple of this


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
        self._pipeline = Pipeline(self._tiers, NO_STAGING, self.metrics)

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

        def fill(piece: HostChunk) -> bool:
            piece.memory.view(torch.int32).random_(generator=generator)
            self.chunks.append(piece.chunk)
            return True

        moving = [c for c in self.plan.chunks if c.number not in self.plan.resident]
        return self._pass(moving, keep_going, fill)

    def mix(
        self, keep_going: Callable[[], bool] = always, chunks: Sequence[Chunk] | None = None
    ) -> StateTrafficFigures:
        """Read chunks (None: all), and write each when it has arrived, as a step does."""
        return self._pass(self.chunks if chunks is None else chunks, keep_going, lambda _: True)

    def read(self, keep_going: Callable[[], bool] = always) -> StateTrafficFigures:
        """Read all chunks, without writes beside it."""
        self._settle()
        return self._pass(self.chunks, keep_going, lambda _: False)

    def _pass(
        self,
        chunks: Sequence[Chunk],
        keep_going: Callable[[], bool],
        work: Callable[[HostChunk], bool],
    ) -> StateTrafficFigures:
        """Take the chunks through the pipeline. work: returns whether it has changed a chunk."""

        def act(piece: HostChunk, _: StagingBuffer | None) -> bool:
            if not keep_going():
                raise _Enough
            return work(piece)

        begin_s = time.perf_counter()
        with suppress(_Enough):  # the pipeline has waited for all that was in flight
            self._pipeline.run(chunks, act)
        return self._moved_since(begin_s)

    def write(self, keep_going: Callable[[], bool] = always) -> StateTrafficFigures:
        """Write all chunks, without reads beside it, from as many buffers."""
        self._settle()
        first = self.chunks[: len(self._tiers.free)]
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
        dirty = self._tiers.unwritten.values()
        for piece, ticket in [(piece, self._tiers.write(piece)) for piece in dirty]:
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


def measure(plan: Plan, directories: Sequence[Path], has_kernel: bool) -> Speeds:
    """Measure the speeds of the drives and cores that the plan uses. has_kernel: False if the
    update runs torch's own code, whose speed is not measured here. Blocks.
    """
    disk = _disk_bytes_per_s(plan, directories) if plan.disk_bytes else None
    update = _update_bytes_per_s(plan) if has_kernel and plan.arena_bytes else None
    return Speeds(disk, update)


def _disk_bytes_per_s(plan: Plan, directories: Sequence[Path]) -> float | None:
    element_bytes = ELEMENT_BYTES * len(FIELDS)
    nbytes = min(plan.disk_bytes, DISK_BYTES)
    # Several times as many chunks as buffers, so that reads and writes overlap.
    wanted = min(plan.buffer_bytes, _CHUNK_BYTES, nbytes // (3 * plan.buffers)) // element_bytes
    chunk_numel = max(wanted // _ROUND_NUMEL, 1) * _ROUND_NUMEL
    small = plan_traffic(nbytes, plan.buffers, chunk_numel)
    if not small.disk_bytes:  # too little to measure
        return None
    with Traffic(small, directories) as traffic:
        traffic.fill()
        moved = traffic.mix()
    return moved.bytes_per_s if moved.read_bytes and moved.written_bytes else None


def _update_bytes_per_s(plan: Plan) -> float:
    numel = max(1, min(_UPDATE_NUMEL, plan.numel, plan.arena_bytes // (TENSORS * ELEMENT_BYTES)))
    memory = [torch.empty(numel, dtype=torch.float32, device="cpu") for _ in range(TENSORS)]
    update = UpdateRun(memory)
    each_s = sorted(update.run_s() for _ in range(_UPDATES))
    return update.touched_bytes / each_s[_UPDATES // 2]


class UpdateRun:
    """A repeatable AdamW update over all of `memory`: `TENSORS` fp32 tensors of one size. They are
    written to first: untouched pages would all be the same zero page.
    """

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self.memory = [tensor.fill_(1.0) for tensor in memory]
        self.touched_bytes = ParamSpec("update", memory[0].numel(), FIELDS).touched_bytes()
        self._rule = rules.Adam.at(
            1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True
        )

    def run_s(self) -> float:
        """Run one update; return its seconds."""
        begin_s = time.perf_counter()
        kernels.update(self._rule, *self.memory)
        return time.perf_counter() - begin_s
