"""Iterations of training in virtual time: passes over the model's units, then the update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch

from offload.core.pool import PIECE_ALIGN, Pool
from offload.optim.pipeline import Pipeline
from offload.optim.staging import StagingBuffer, StagingProvider
from offload.optim.tiers import HostChunk, Tiers
from offload.params.block_staging import BlockStaging, SpilledGradientReader
from offload.params.trace import Phase
from offload.planning.layout import Chunk
from offload.planning.training import TrainingPlan
from offload.storage.disk import DiskStore
from offload.storage.weight_blocks import WeightBlock
from offload.tools.forecast.simulation.activations import VirtualActivations
from offload.tools.forecast.simulation.facts import spilled_params, staged_chunks
from offload.tools.forecast.simulation.gradients import VirtualGradients
from offload.tools.forecast.simulation.memory import VirtualPool, VirtualWeightBlock, units_of
from offload.tools.forecast.simulation.staging import VirtualStaging
from offload.tools.forecast.simulation.world import VirtualSpeeds, VirtualWorld
from offload.tools.forecast.workload import BACKWARD, FORWARD, Workload, WorkloadUse

COMPUTE, UPDATE, BETWEEN = "compute", "update", "between"
_PHASES = list(Phase)


@dataclass(frozen=True)
class VirtualIterationCosts:
    """The seconds and counts of one iteration. model, step: seconds by cause, outside of `step()`
    and in it. busy: seconds in which each resource had work.
    """

    seconds: float
    model: Mapping[str, float]
    step: Mapping[str, float]
    counts: Mapping[str, float]
    busy: Mapping[str, float]
    depth: int


class Training:
    """The training of one workload, planned within budgets, in a world of its own."""

    def __init__(self, work: Workload, plan: TrainingPlan, world: VirtualWorld) -> None:
        self._work, self._plan, self._world = work, plan, world
        self._clock, self._speeds = world.clock, world.speeds
        self._units = units_of(work.units)
        pool = VirtualPool(max(plan.state.arena_bytes, PIECE_ALIGN))
        self._tiers = Tiers(plan.state, cast("Pool", pool), cast("DiskStore", world.store))
        self._update_s = [self._seconds_of(chunk, world.speeds) for chunk in plan.state.chunks]
        self._gradients = VirtualGradients(work, spilled_params(plan), staged_chunks(plan), world)
        self._staging_buffers = self._make_staging()
        self._activations = self._make_activations()
        self._made_bytes = self._made_by_uses()
        self._kept: dict[int, list[int]] = {}  # bytes of activations, by unit
        both = enumerate(pairwise(use.phase for use in work.uses))
        self._turns = {n for n, phases in both if phases == (FORWARD, BACKWARD)}
        self._take_in()

    def _take_in(self) -> None:
        """Give the residency all blocks, as the engine begins: those that stay resident first."""
        residency, facts = self._world.residency, self._work.units
        store = self._world.store
        if residency is None:
            return
        for number in sorted(range(len(facts)), key=lambda number: not facts[number].is_kept):
            block = residency.blocks[number]
            if facts[number].is_weight_block and store is not None:
                residency.adopt(
                    block, lambda key: cast("WeightBlock", VirtualWeightBlock(store, key))
                )
            else:
                residency.take_in(block)
            if facts[number].is_kept:
                residency.tier.keep(block)
        residency.cache.has_room_for_all = self._plan.shares.holds_all_params
        residency.tier.watch_edits()

    def _make_staging(self) -> StagingProvider | None:
        world, plan = self._world, self._plan.state
        if world.residency is not None:
            blocks = world.residency.blocks
            places = {
                number: (blocks[spec.unit], 0, torch.float32)
                for number, spec in enumerate(plan.params)
                if spec.unit is not None
            }
            reader = cast("SpilledGradientReader", self._gradients)
            return BlockStaging(world.residency, places, reader)
        if plan.staging_buffers and world.device is not None:
            return VirtualStaging(world.device, plan)
        return None

    def _make_activations(self) -> VirtualActivations | None:
        nbytes, store = self._plan.shares.activations, self._world.store
        return VirtualActivations(self._clock, store, nbytes) if nbytes and store else None

    # --- one iteration ----------------------------------------------------------------------------

    def iterate(self) -> VirtualIterationCosts:
        world = self._world
        begin_s, busy = self._clock.now_s, world.busy_s()
        counts = dict(world.metrics.counts)
        with self._counted() as model:
            self._between()
            self._pass_through()
        with self._counted() as step:
            self._step()
        return VirtualIterationCosts(
            self._clock.now_s - begin_s,
            model,
            step,
            _since(counts, world.metrics.counts),
            _since(busy, world.busy_s()),
            world.residency.prefetch.depth if world.residency is not None else 0,
        )

    @contextmanager
    def _counted(self) -> Iterator[dict[str, float]]:
        """Count the seconds that are spent while the block runs, by cause."""
        before, found = dict(self._clock.seconds), dict[str, float]()
        yield found
        found |= _since(before, self._clock.seconds)

    def _between(self) -> None:
        device, plan = self._world.device, self._plan.state
        if device is not None and plan.has_grad_buffers:  # downloaded while backward runs
            device.download(sum(spec.numel * spec.device_bytes for spec in plan.params))
        beside = self._speeds.compute_beside_disk if device is None else 1.0
        with self._clock.cause(BETWEEN):
            self._clock.spend(self._work.between_s, beside)

    def _pass_through(self) -> None:
        residency = self._world.residency
        last: int | None = None
        for number, use in enumerate(self._work.uses if residency is not None else ()):
            assert residency is not None
            if last is None or (use.phase == BACKWARD) != (last == BACKWARD):
                if last is not None:
                    residency.tier.watch_edits()
                residency.tier.collect_edits()
            last = use.phase
            self._use(number, use)
        if residency is not None:
            residency.tier.watch_edits()
        self._kept.clear()
        if self._activations is not None:
            self._activations.forget()

    def _use(self, number: int, use: WorkloadUse) -> None:
        residency, device = self._world.residency, self._world.device
        assert residency is not None, "what is not prepared has no uses"
        if use.phase == BACKWARD:
            self._bring_activations(use.unit)
        unit = self._units[use.unit]
        residency.use(unit, _PHASES[use.phase])
        if device is None:
            with self._clock.cause(COMPUTE):
                self._clock.spend(use.compute_s, self._speeds.compute_beside_disk)
        else:
            device.compute(use.compute_s)
        residency.done(unit)
        if use.phase == FORWARD:
            self._keep_activations(use.unit, self._made_bytes[number])
        self._keep_logits(number)
        self._gradients.follow(number)

    # --- activations ------------------------------------------------------------------------------

    def _made_by_uses(self) -> list[int]:
        """Divide the activations among the forward uses, in proportion to their computing time."""
        uses = self._work.uses
        forward_s = sum(use.compute_s for use in uses if use.phase == FORWARD)
        share = self._work.activation_bytes / forward_s if forward_s else 0.0
        return [int(use.compute_s * share) if use.phase == FORWARD else 0 for use in uses]

    def _keep_activations(self, unit: int, nbytes: int) -> None:
        self._kept.setdefault(unit, []).append(nbytes)
        if self._world.device is not None and self._offloads:
            self._world.device.download(nbytes)
        elif self._world.memory is not None:
            self._world.memory.take(nbytes, by_others=True)
        if self._activations is not None:
            self._activations.keep(unit, nbytes)

    def _bring_activations(self, unit: int) -> None:
        """Fetch the activations of the unit's latest forward use, unless an earlier backward use
        has taken them. On a device that keeps its activations they are freed.
        """
        kept = self._kept.get(unit)
        nbytes = kept.pop() if kept else 0
        if self._activations is not None:
            self._activations.want(unit)
        if self._world.device is not None and self._offloads:
            self._world.device.need(self._world.device.upload(nbytes).end_s)
        elif self._world.memory is not None:
            self._world.memory.give_back(nbytes, by_others=True)

    def _keep_logits(self, number: int) -> None:
        """Count the logits as device memory from the end of forward until backward is past the last
        unit.
        """
        memory, logits = self._world.memory, self._work.logits_bytes
        if memory is not None and number in self._turns:
            memory.take(logits, by_others=True)
        elif memory is not None and number - 1 in self._turns:
            memory.give_back(logits, by_others=True)

    @property
    def _offloads(self) -> bool:
        return self._plan.shares.activations > 0

    # --- the update -------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._world.device is not None:
            self._world.device.settle()  # backward has ended: gradients are in host memory
        if self._staging_buffers is not None:
            self._staging_buffers.begin_step({}, {})
        chunks = self._plan.state.chunks
        Pipeline(self._tiers, self._staging_buffers, self._world.metrics).run(chunks, self._update)
        if self._staging_buffers is not None:
            self._staging_buffers.end_step()

    def _update(self, piece: HostChunk, staging_buffer: StagingBuffer | None) -> bool:
        self._clock.spend(self._update_s[piece.chunk.number], self._speeds.update_beside_disk)
        return True

    def _seconds_of(self, chunk: Chunk, speeds: VirtualSpeeds) -> float:
        """Compute the seconds of a chunk's update from the bytes that it reads and writes."""
        specs = self._plan.facts.params
        touched = (
            specs[part.param].touched_bytes() * (part.end - part.begin) / specs[part.param].numel
            for part in chunk.slices
        )
        return sum(touched) / speeds.update_bytes_per_s


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
