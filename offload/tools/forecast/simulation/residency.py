"""The engine's residency of blocks, in virtual time.

The engine's own code decides which blocks are fetched and evicted, when, and to which place in
memory. Left out is all that would touch a parameter: no code sees one here, holds a view of one or
changes one. The search for external edits takes time all the same, which the clock counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.params.block import Block, Presence
from offload.params.block_store import KEY
from offload.params.external_edits import ExternalEdits
from offload.params.placeholder import Owner
from offload.params.prefetch_depth import PrefetchDepth
from offload.params.residency import Residency, ResidencyParts
from offload.params.trace import Phase, Trace
from offload.storage.disk import DiskStore
from offload.tools.forecast.simulation.clock import Clock
from offload.tools.forecast.simulation.memory import FactUnit, VirtualPool, VirtualStore

LOOKING = "looking for edits"


class VirtualPrefetchDepth(PrefetchDepth):
    """The prefetch depth, derived by the clock of the simulation."""

    def __init__(
        self, clock: Clock, metrics: Metrics, trace: Trace, sizes: Sequence[int], depth: int | None
    ) -> None:
        self._clock = clock
        super().__init__(metrics, trace, sizes, KEY, depth)

    def note_use(self, phase: Phase, unit: int) -> None:
        self._trace.record(phase, unit, self._take_time(self._clock.now_s))
        self._uses += 1
        if self._is_derived and self._uses >= self._units:
            self._uses, self.depth = 0, self.derive()

    def pause(self, now_s: float | None = None) -> None:
        """Do nothing: no timeline of what is computed is drawn."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begin_s = self._clock.now_s
        try:
            yield
        finally:
            self._waited_s += self._clock.now_s - begin_s

    def _look(self) -> None:
        super()._look()
        self._since_s = self._clock.now_s


class VirtualExternalEdits(ExternalEdits):
    """The search for external edits. There are none; to find that reads all bytes.
    look_bytes_per_s: None: the time that it takes is not counted.
    """

    def __init__(self, clock: Clock, look_bytes_per_s: float | None) -> None:
        super().__init__(lambda block: None)
        self._clock = clock
        self._look_bytes_per_s = look_bytes_per_s

    def begin(self, blocks: Iterable[Block]) -> None:
        self._may_come = True
        for block in blocks:
            is_safe = block.is_stored or block.writing is not None
            if block.is_attached and block.nbytes and is_safe and block.seen is None:
                self._look_at(block)
                block.seen = 0

    def find(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            if self._may_come and block.seen is not None and block.memory is not None:
                self._look_at(block)
        return iter(())

    def _look_at(self, block: Block) -> None:
        if self._look_bytes_per_s is not None:
            with self._clock.cause(LOOKING):
                self._clock.spend(block.nbytes / self._look_bytes_per_s)


class VirtualPlaceholderOwner:
    """An owner of placeholders whose values no code asks for."""

    device = torch.device("cpu")

    def name_of(self, param: Tensor) -> str:
        raise AssertionError("there are no parameters here")

    def bring(self, params: Sequence[Tensor]) -> bool:
        raise AssertionError("there are no parameters here")


def parts_of(
    units: Sequence[FactUnit],
    pool: VirtualPool,
    store: VirtualStore | None,
    trace: Trace,
    metrics: Metrics,
    depth: int | None,
) -> ResidencyParts:
    """Make the parts of a residency whose pool and store are virtual."""
    owner = cast("Owner", VirtualPlaceholderOwner())
    return ResidencyParts(
        units, cast("Pool", pool), cast("DiskStore", store), trace, owner, metrics, depth
    )


class VirtualResidency(Residency):
    """A residency whose blocks have no bytes, and so no address; no other code holds them."""

    def take_over(self, clock: Clock, look_bytes_per_s: float | None, depth: int | None) -> None:
        """Use this clock from now on, for the prefetch depth and the search for external edits."""
        self.prefetch = VirtualPrefetchDepth(clock, self._metrics, self.trace, self._sizes, depth)
        self._edits = VirtualExternalEdits(clock, look_bytes_per_s)

    def _take_place(self, block: Block, memory: Tensor) -> None:
        block.memory = memory

    def _forget_memory(self, block: Block) -> None:
        block.memory = None
        block.move_in_host(Presence.AWAY)

    def _is_held_elsewhere(self, block: Block) -> bool:
        return False


class VirtualHostResidency(VirtualResidency):
    """The residency of a model on the CPU."""
