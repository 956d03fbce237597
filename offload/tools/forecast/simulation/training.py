"""Iterations of training in virtual time: passes over the model's units, then the update, on a
machine with drives and perhaps a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.core.pool import PIECE_ALIGN, Pool
from offload.device import READS_IN_FLIGHT_BYTES, DeviceGauge, DeviceTransfer
from offload.optim.pipeline import Pipeline
from offload.optim.staging import NO_STAGING, StagingBuffer, StagingProvider
from offload.optim.tiers import HostChunk, Tiers
from offload.params.block_staging import BlockStaging, SpilledGradientReader
from offload.params.residency import Device, Residency, make_residency
from offload.params.spill import slot_bytes
from offload.params.trace import Phase
from offload.planning.layout import ELEMENT_BYTES, Chunk, ParamSpec
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuning
from offload.planning.training import TrainingPlan
from offload.storage.disk import DiskStore
from offload.storage.weights import WeightBlock
from offload.tools.forecast.simulation.activations import VirtualActivations
from offload.tools.forecast.simulation.clock import Clock, Drives, Rates, VirtualMetrics
from offload.tools.forecast.simulation.device import VirtualDevice
from offload.tools.forecast.simulation.gradients import VirtualGradients
from offload.tools.forecast.simulation.memory import (
    VirtualPool,
    VirtualStore,
    VirtualWeightBlock,
    units_of,
)
from offload.tools.forecast.simulation.staging import VirtualStaging
from offload.tools.forecast.workload import BACKWARD, FORWARD, Workload, WorkloadUse

COMPUTE, UPDATE, BETWEEN = "compute", "update", "between"
LOOKING = "looking for edits"
DISK, DEVICE, UP, DOWN = "disk", "device", "copies to the device", "copies to the host"
WHOLE, AHEAD = "whole", "prefetch depth"
STEP, MODEL = "step(): ", "model: "  # where the time is spent, as in a run's file
_PHASES = list(Phase)
_USABLE = 0.9  # of a device's memory: the limit if the budgets have none
_ENDLESS = 1 << 62


class VirtualPlaceholderOwner:
    """An owner of placeholders whose values no code asks for."""

    device = torch.device("cpu")

    def name_of(self, param: Tensor) -> str:
        raise AssertionError("there are no parameters here")

    def bring(self, params: Sequence[Tensor]) -> bool:
        raise AssertionError("there are no parameters here")


class Training:
    """The training of one workload by a plan on a machine: the engine's parts on a clock, drives
    without files and memory without bytes.
    """

    def __init__(
        self, work: Workload, plan: TrainingPlan, machine: Profile, tuning: Tuning
    ) -> None:
        self._work, self._plan = work, plan
        self._update_bytes_per_s = _update_bytes_per_s(machine)
        self._memory_bytes_per_s = machine.memory_bytes_per_s  # None: what it does takes no time
        # The shares of a speed that are left while the drives work.
        self._compute_beside_disk = machine.compute_beside_disk or 1.0
        self._update_beside_disk = machine.update_beside_disk or 1.0
        self._units = units_of(work.units)
        directories, drives = plan.budgets.directories, None
        reads_files = any(unit.is_weight_block for unit in work.units)
        if reads_files or (directories and _moves(plan)):
            drives = Drives(Rates.of(machine, max(1, directories)), tuning.queue_depth)
        self._clock = Clock(drives)
        self._metrics = VirtualMetrics(self._clock)
        self._store = VirtualStore(self._clock, self._metrics) if drives is not None else None
        self._device = self._make_device(machine)
        self._memory = self._device.memory if self._device is not None else None
        self._residency: Residency | None = None
        if work.units:
            limit = _device_bytes(plan.budgets, machine)
            self._residency = self._make_residency(limit, tuning.prefetch_depth)
        pool = VirtualPool(max(plan.state.arena_bytes, PIECE_ALIGN))
        self._tiers = Tiers(plan.state, cast("Pool", pool), cast("DiskStore", self._store))
        self._update_s = [self._seconds_of(chunk) for chunk in plan.state.chunks]
        self._gradients = VirtualGradients(
            work,
            spilled_params(plan),
            staged_chunks(plan),
            self._clock,
            self._metrics,
            self._store,
            self._device,
            self._memory_bytes_per_s,
        )
        self._staging_buffers = self._make_staging()
        self._activations = self._make_activations()
        self._made_bytes = self._made_by_uses()
        self._kept: dict[int, list[int]] = {}  # bytes of activations, by unit
        both = enumerate(pairwise(use.phase for use in work.uses))
        self._turns = {n for n, phases in both if phases == (FORWARD, BACKWARD)}
        self._take_in()

    def _make_device(self, machine: Profile) -> VirtualDevice | None:
        work = self._work
        if work.device == "cpu":
            return None
        largest = max((unit.nbytes for unit in work.units), default=0)
        waiting = min(largest, READS_IN_FLIGHT_BYTES)
        return VirtualDevice(self._clock, machine, self._metrics, work.device, waiting)

    def _make_residency(self, limit_bytes: int, depth: int | None) -> Residency:
        on = None
        if self._device is not None:
            gauge = cast("DeviceGauge", self._memory)
            on = Device(cast("DeviceTransfer", self._device), limit_bytes, gauge)
        return make_residency(
            self._units,
            cast("Pool", VirtualPool(max(self._plan.shares.params, PIECE_ALIGN))),
            cast("DiskStore", self._store),
            self._metrics,
            VirtualPlaceholderOwner(),
            depth,
            on,
            now_s=lambda: self._clock.now_s,
            checksum=self._look,
        )

    def _look(self, memory: Tensor) -> int:
        """Compute the checksum of a block without bytes, to find external edits. There are none; it
        takes time all the same.
        """
        if self._memory_bytes_per_s is not None:
            with self._clock.cause(LOOKING):
                self._clock.spend(memory.nbytes / self._memory_bytes_per_s)
        return 0

    def _take_in(self) -> None:
        """Give the residency all blocks, as the engine begins: those that stay resident first."""
        residency, facts, store = self._residency, self._work.units, self._store
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

    def _make_staging(self) -> StagingProvider:
        residency, plan = self._residency, self._plan.state
        if residency is not None:
            blocks = residency.blocks
            places = {
                number: (blocks[spec.unit], 0, torch.float32)
                for number, spec in enumerate(plan.params)
                if spec.unit is not None
            }
            reader = cast("SpilledGradientReader", self._gradients)
            return BlockStaging(residency, places, reader)
        if plan.staging_buffers and self._device is not None:
            return VirtualStaging(self._device, plan)
        return NO_STAGING

    def _make_activations(self) -> VirtualActivations | None:
        nbytes, store = self._plan.shares.activations, self._store
        return VirtualActivations(self._clock, store, nbytes) if nbytes and store else None

    # --- one iteration ----------------------------------------------------------------------------

    def iterate(self) -> dict[str, float]:
        """Run one iteration. Return its seconds: the whole under `WHOLE`, by cause after `STEP` in
        `step()` and after `MODEL` outside of it, and in which each resource had work; and its
        counts, with the prefetch depth under `AHEAD`.
        """
        begin_s, before = self._clock.now_s, self._busy()
        start = dict(self._clock.seconds)
        self._between()
        self._pass_through()
        middle = dict(self._clock.seconds)
        self._step()
        found = _since(before, self._busy())
        found[WHOLE] = self._clock.now_s - begin_s
        found[AHEAD] = self._residency.prefetch.depth if self._residency is not None else 0
        for name, seconds in _since(middle, self._clock.seconds).items():
            found[f"{STEP}{name}"] = seconds
        for name, seconds in _since(start, middle).items():
            found[f"{MODEL}{name}"] = seconds
        return found

    def _busy(self) -> dict[str, float]:
        """Return the seconds for which each resource has been busy so far, and all counts."""
        found, device = dict[str, float](self._metrics.counts), self._device
        if self._clock.drives is not None:
            found[DISK] = self._clock.drives.busy_s
        if device is not None:
            found |= {DEVICE: device.busy_s, UP: device.up_s, DOWN: device.down_s}
        return found

    def _between(self) -> None:
        device, plan = self._device, self._plan.state
        if device is not None and plan.has_grad_buffers:  # downloaded while backward runs
            device.download(sum(spec.numel * spec.device_bytes for spec in plan.params))
        beside = self._compute_beside_disk if device is None else 1.0
        with self._clock.cause(BETWEEN):
            self._clock.spend(self._work.between_s, beside)

    def _pass_through(self) -> None:
        residency = self._residency
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
        residency, device = self._residency, self._device
        assert residency is not None, "what is not prepared has no uses"
        if use.phase == BACKWARD:
            self._bring_activations(use.unit)
        unit = self._units[use.unit]
        residency.use(unit, _PHASES[use.phase])
        if device is None:
            with self._clock.cause(COMPUTE):
                self._clock.spend(use.compute_s, self._compute_beside_disk)
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
        if self._device is not None and self._offloads:
            self._device.download(nbytes)
        elif self._memory is not None:
            self._memory.take(nbytes, by_others=True)
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
        if self._device is not None and self._offloads:
            self._device.need(self._device.upload(nbytes).end_s)
        elif self._memory is not None:
            self._memory.give_back(nbytes, by_others=True)

    def _keep_logits(self, number: int) -> None:
        """Count the logits as device memory from the end of forward until backward is past the last
        unit.
        """
        memory, logits = self._memory, self._work.logits_bytes
        if memory is not None and number in self._turns:
            memory.take(logits, by_others=True)
        elif memory is not None and number - 1 in self._turns:
            memory.give_back(logits, by_others=True)

    @property
    def _offloads(self) -> bool:
        return self._plan.shares.activations > 0

    # --- the update -------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._device is not None:
            self._device.settle()  # backward has ended: gradients are in host memory
        self._staging_buffers.begin_step({}, {})
        chunks = self._plan.state.chunks
        Pipeline(self._tiers, self._staging_buffers, self._metrics).run(chunks, self._update)
        self._staging_buffers.end_step()

    def _update(self, piece: HostChunk, staging_buffer: StagingBuffer | None) -> bool:
        self._clock.spend(self._update_s[piece.chunk.number], self._update_beside_disk)
        return True

    def _seconds_of(self, chunk: Chunk) -> float:
        """Compute the seconds of a chunk's update from the bytes that it reads and writes."""
        specs = self._plan.facts.params
        touched = (
            specs[part.param].touched_bytes() * (part.end - part.begin) / specs[part.param].numel
            for part in chunk.slices
        )
        return sum(touched) / self._update_bytes_per_s


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def _update_bytes_per_s(machine: Profile) -> float:
    if not machine.update_bytes_per_s:
        raise ConfigError(
            f"profile {machine.name}: expected update_bytes_per_s, the speed of the update; "
            "`offload bench` measures it"
        )
    return machine.update_bytes_per_s


def _moves(plan: TrainingPlan) -> bool:
    """Return whether anything is written to drives, and read there."""
    shares = plan.shares
    some = shares.spilled or shares.activations or not shares.holds_all_params
    return bool(plan.state.disk_bytes or some)


def _device_bytes(budgets: Budgets, machine: Profile) -> int:
    if budgets.device_bytes is not None:
        return budgets.device_bytes
    known = machine.device_memory_bytes
    return int(known * _USABLE) if known else _ENDLESS


def in_order_of_units(specs: Sequence[ParamSpec]) -> list[int]:
    return sorted(range(len(specs)), key=lambda number: specs[number].unit or 0)


def spilled_params(plan: TrainingPlan) -> frozenset[int]:
    """Return the numbers of the parameters whose gradients are spilled."""
    order = in_order_of_units(plan.facts.params)
    return frozenset(order[number] for number in plan.shares.spilled)


def staged_chunks(plan: TrainingPlan) -> int:
    """Return the number of chunks whose spilled gradients can be staged at once."""
    if not plan.shares.spilled:
        return 0
    slot = slot_bytes(plan.state.chunks, dict.fromkeys(spilled_params(plan), ELEMENT_BYTES))
    return max(1, plan.shares.staging // max(1, slot))
