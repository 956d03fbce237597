"""Gradients in virtual time: downloaded from a device, and spilled to the store and read again if
host memory has no room for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from offload.core.metrics import Metrics
from offload.optim.gradient_source import Gradient
from offload.params.spill import slot_bytes
from offload.planning.layout import ELEMENT_BYTES, Chunk, ParamSpec, Slice
from offload.planning.training import TrainingPlan
from offload.storage.engine import Priority
from offload.telemetry.run_file import ParamFact
from offload.tools.forecast.simulation.clock import Clock
from offload.tools.forecast.simulation.device import VirtualDevice
from offload.tools.forecast.simulation.memory import VirtualStore, VirtualTicket
from offload.tools.forecast.workload import BACKWARD, Workload

COPY = "gradient copy"


class VirtualGradients:
    """The gradients of one model."""

    def __init__(
        self,
        work: Workload,
        plan: TrainingPlan,
        clock: Clock,
        metrics: Metrics,
        store: VirtualStore | None,
        device: VirtualDevice | None,
    ) -> None:
        order = in_order_of_units(work.params)
        self._params = work.params
        self._spilled = frozenset(order[number] for number in plan.shares.spilled)
        slot = slot_bytes(plan.state.chunks, dict.fromkeys(self._spilled, ELEMENT_BYTES))
        self._slots = max(1, plan.shares.staging // max(1, slot))  # of chunks staged at once
        self._taken: set[int] = set()  # numbers of chunks
        self._clock, self._metrics = clock, metrics
        self._store, self._device = store, device
        self._bytes: Counter[int] = Counter()  # by unit
        self._spilled_bytes: Counter[int] = Counter()
        for number, param in enumerate(work.params):
            if param.unit is not None:
                self._bytes[param.unit] += param.grad_bytes
                if number in self._spilled:
                    self._spilled_bytes[param.unit] += param.grad_bytes
        self._whole_after = _last_uses(work)

    def follow(self, number: int) -> None:
        """Note that the use of this number has been computed: gradients to which this pass adds
        nothing any more are downloaded, and those that are spilled are written.
        """
        for unit in self._whole_after.get(number, ()):
            if self._device is not None and self._bytes[unit]:
                self._device.download(self._bytes[unit])
            if self._spilled_bytes[unit]:
                self._push_out(self._spilled_bytes[unit])

    def _push_out(self, nbytes: int) -> None:
        assert self._store is not None, "nothing is spilled without a disk"
        self._clock.spend_in_memory(2 * nbytes, COPY)
        self._store.start("gradients", nbytes, True, Priority.WRITE_BACK)
        self._metrics.count("spilled_bytes", nbytes)

    # --- for the update ---------------------------------------------------------------------------

    def begin(self, grads: Mapping[int, Gradient], chunks: Iterable[Chunk]) -> None:
        self.end()

    def has_place(self, chunk: Chunk) -> bool:
        return len(self._taken) < self._slots or not self._bytes_of(chunk)

    def take(self, chunk: Chunk) -> Mapping[Slice, VirtualTicket]:
        """Start to read the spilled gradients of a chunk."""
        nbytes = self._bytes_of(chunk)
        if not nbytes or self._store is None:
            return {}
        self._taken.add(chunk.number)
        read = self._store.start("gradients", nbytes, False, Priority.PREFETCH, "gradient read")
        return {chunk.slices[0]: read}

    def give_back(self, chunk: Chunk) -> None:
        self._taken.discard(chunk.number)

    def end(self) -> None:
        self._taken.clear()

    def _bytes_of(self, chunk: Chunk) -> int:
        params = self._params
        return sum(
            (part.end - part.begin) * params[part.param].grad_bytes // params[part.param].numel
            for part in chunk.slices
            if part.param in self._spilled
        )


def in_order_of_units(params: Sequence[ParamFact | ParamSpec]) -> list[int]:
    return sorted(range(len(params)), key=lambda number: params[number].unit or 0)


def _last_uses(work: Workload) -> dict[int, list[int]]:
    """Return, by the number of a use, the units for which it is the last in a backward pass."""
    found: dict[int, list[int]] = {}
    last: dict[int, int] = {}  # of the present pass, by unit
    for number, use in [*enumerate(work.uses), (len(work.uses), None)]:
        if use is not None and use.phase == BACKWARD:
            last |= dict.fromkeys(work.units[use.unit].needs, number)
            continue
        for unit, at in last.items():
            found.setdefault(at, []).append(unit)
        last = {}
    return found
