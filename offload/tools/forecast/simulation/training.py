"""Iterations of training in virtual time: passes over the model's units, then the update, on a
machine with drives and perhaps a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.core.pool import PIECE_ALIGN, Pool
from offload.device.accelerator import DeviceGauge
from offload.device.device import READS_IN_FLIGHT_BYTES, DeviceTransfer
from offload.optim.pipeline import Pipeline
from offload.optim.staging import NO_STAGING, StagingBuffer, StagingProvider
from offload.optim.tiers import HostChunk, Tiers
from offload.params.block_staging import BlockStaging, SpilledGradientReader
from offload.params.residency import Device, Residency, make_residency
from offload.params.trace import Phase
from offload.planning.layout import Slice
from offload.planning.profile import Profile, Tuning
from offload.planning.training import TrainingPlan
from offload.storage.disk import DiskStore
from offload.storage.weights import WeightBlock
from offload.tools.forecast.simulation.activations import VirtualActivations
from offload.tools.forecast.simulation.clock import Clock, Drives, Rates, VirtualMetrics
from offload.tools.forecast.simulation.device import VirtualDevice, VirtualStaging
from offload.tools.forecast.simulation.gradients import VirtualGradients
from offload.tools.forecast.simulation.memory import (
    FactUnit,
    VirtualPool,
    VirtualStore,
    VirtualWeightBlock,
)
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
        # The shares of a speed that are left while the drives work.
        self._compute_beside_disk = machine.compute_beside_disk or 1.0
        self._update_beside_disk = machine.update_beside_disk or 1.0
        self._units = [
            FactUnit(number, fact.name, (), (), fact.needs, fact.nbytes)
            for number, fact in enumerate(work.units)
        ]
        directories, drives = plan.budgets.directories, None
        reads_files = any(unit.is_weight_block for unit in work.units)
        if reads_files or (directories and _moves(plan)):
            drives = Drives(Rates.of(machine, max(1, directories)), tuning.queue_depth)
        self._clock = Clock(drives, machine.memory_bytes_per_s)
        self._metrics = VirtualMetrics(self._clock)
        self._store = VirtualStore(self._clock, self._metrics) if drives is not None else None
        self._device = self._make_device(machine)
        self._residency: Residency | None = None
        if work.units:
            self._residency = self._make_residency(machine, tuning.prefetch_depth)
        pool = VirtualPool(max(plan.state.arena_bytes, PIECE_ALIGN))
        self._tiers = Tiers(plan.state, cast("Pool", pool), cast("DiskStore", self._store))
        self._update_s = self._seconds_of_updates(machine)
        self._gradients = VirtualGradients(
            work, plan, self._clock, self._metrics, self._store, self._device
        )
        self._staging_buffers = self._make_staging()
        limit = plan.shares.activations
        self._activations = VirtualActivations(work, limit, self._store, self._device)
        self._take_in()

    def _make_device(self, machine: Profile) -> VirtualDevice | None:
        work = self._work
        if work.device == "cpu":
            return None
        largest = max((unit.nbytes for unit in work.units), default=0)
        waiting = min(largest, READS_IN_FLIGHT_BYTES)
        return VirtualDevice(self._clock, machine, self._metrics, work.device, waiting)

    def _make_residency(self, machine: Profile, depth: int | None) -> Residency:
        on = None
        if self._device is not None:
            limit, known = self._plan.budgets.device_bytes, machine.device_memory_bytes
            if limit is None:
                limit = int(known * _USABLE) if known else _ENDLESS
            gauge = cast("DeviceGauge", self._device.memory)
            on = Device(cast("DeviceTransfer", self._device), limit, gauge)
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
        self._clock.spend_in_memory(memory.nbytes, LOOKING)
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
        if device is not None and self._residency is None:
            device.compute(self._work.between_s)  # the passes of a wrapped optimizer's model
            return
        beside = self._compute_beside_disk if device is None else 1.0
        with self._clock.cause(BETWEEN):
            self._clock.spend(self._work.between_s, beside)

    def _pass_through(self) -> None:
        residency = self._residency
        if residency is None:  # what is not prepared has no uses
            return
        last: int | None = None
        for number, use in enumerate(self._work.uses):
            if last is None or (use.phase == BACKWARD) != (last == BACKWARD):
                if last is not None:
                    residency.tier.watch_edits()
                residency.tier.collect_edits()
            last = use.phase
            self._use(residency, number, use)
        residency.tier.watch_edits()
        self._activations.forget()

    def _use(self, residency: Residency, number: int, use: WorkloadUse) -> None:
        if use.phase == BACKWARD:
            self._activations.want(use.unit)
        unit = self._units[use.unit]
        residency.use(unit, _PHASES[use.phase])
        if self._device is None:
            with self._clock.cause(COMPUTE):
                self._clock.spend(use.compute_s, self._compute_beside_disk)
        else:
            self._device.compute(use.compute_s)
        residency.done(unit)
        if use.phase == FORWARD:
            self._activations.keep(number, use.unit)
        self._activations.note_end(number)
        self._gradients.follow(number)

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

    def _seconds_of_updates(self, machine: Profile) -> list[float]:
        """Compute the seconds of each chunk's update from the bytes that it reads and writes."""
        speed, specs = machine.update_bytes_per_s, self._plan.facts.params
        if not speed:
            raise ConfigError(
                f"profile {machine.name}: expected update_bytes_per_s, the speed of the update; "
                "`offload bench` measures it"
            )

        def touched_by(part: Slice) -> float:
            spec = specs[part.param]
            return spec.touched_bytes() * (part.end - part.begin) / spec.numel

        return [sum(map(touched_by, chunk.slices)) / speed for chunk in self._plan.state.chunks]


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def _moves(plan: TrainingPlan) -> bool:
    """Return whether anything is written to drives, and read there."""
    shares = plan.shares
    some = shares.spilled or shares.activations or not shares.holds_all_params
    return bool(plan.state.disk_bytes or some)
