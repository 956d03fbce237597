"""The world of a simulated training: clock, drives, memory, and a device if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.core.pool import PIECE_ALIGN, Pool
from offload.device import READS_IN_FLIGHT_BYTES, DeviceGauge, DeviceTransfer
from offload.params.residency import Device, Residency, make_residency
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuning
from offload.planning.training import TrainingPlan
from offload.storage.disk import DiskStore
from offload.tools.forecast.simulation.clock import Clock, VirtualMetrics
from offload.tools.forecast.simulation.device import (
    CopyRates,
    VirtualDevice,
    VirtualDeviceMemory,
    VirtualGauge,
    VirtualTransfer,
)
from offload.tools.forecast.simulation.drives import Drives, Rates
from offload.tools.forecast.simulation.memory import VirtualPool, VirtualStore, units_of
from offload.tools.forecast.workload import Workload

LOOKING = "looking for edits"
DISK, DEVICE, UP, DOWN = "disk", "device", "copies to the device", "copies to the host"
_USABLE = 0.9  # of a device's memory: the limit if the budgets have none
_ENDLESS = 1 << 62


@dataclass(frozen=True)
class VirtualSpeeds:
    """The speeds of a machine. compute_beside_disk, update_beside_disk: the share of a speed that
    is left while the drives work. memory_bytes_per_s: None: copies and reads in memory take no
    time.
    """

    update_bytes_per_s: float
    memory_bytes_per_s: float | None
    compute_beside_disk: float
    update_beside_disk: float

    @classmethod
    def of(cls, machine: Profile) -> VirtualSpeeds:
        if not machine.update_bytes_per_s:
            raise ConfigError(
                f"profile {machine.name}: expected update_bytes_per_s, the speed of the update; "
                "`offload bench` measures it"
            )
        return cls(
            machine.update_bytes_per_s,
            machine.memory_bytes_per_s,
            machine.compute_beside_disk or 1.0,
            machine.update_beside_disk or 1.0,
        )


class VirtualPlaceholderOwner:
    """An owner of placeholders whose values no code asks for."""

    device = torch.device("cpu")

    def name_of(self, param: Tensor) -> str:
        raise AssertionError("there are no parameters here")

    def bring(self, params: Sequence[Tensor]) -> bool:
        raise AssertionError("there are no parameters here")


@dataclass(frozen=True)
class VirtualChecksum:
    """The checksum of blocks without bytes, to find external edits. There are none; it takes time
    all the same. look_bytes_per_s: None: not even that.
    """

    clock: Clock
    look_bytes_per_s: float | None

    def __call__(self, memory: Tensor) -> int:
        if self.look_bytes_per_s is not None:
            with self.clock.cause(LOOKING):
                self.clock.spend(memory.nbytes / self.look_bytes_per_s)
        return 0


@dataclass
class VirtualWorld:
    """The world of a simulated training: the machine and the engine's parts on it. residency: None
    if the model is not prepared. memory: of the device.
    """

    clock: Clock
    metrics: VirtualMetrics
    speeds: VirtualSpeeds
    store: VirtualStore | None
    residency: Residency | None
    device: VirtualDevice | None
    memory: VirtualDeviceMemory | None

    def busy_s(self) -> dict[str, float]:
        """Return the seconds for which each resource has been busy so far."""
        found = {}
        if self.clock.drives is not None:
            found[DISK] = self.clock.drives.busy_s
        if self.device is not None:
            there = self.device
            found |= {DEVICE: there.busy_s, UP: there.up_s, DOWN: there.down_s}
        return found


def make_world(
    work: Workload, machine: Profile, tuning: Tuning, plan: TrainingPlan
) -> VirtualWorld:
    speeds, directories = VirtualSpeeds.of(machine), plan.budgets.directories
    drives = None
    reads_files = any(unit.is_weight_block for unit in work.units)
    if reads_files or (directories and _moves(plan)):
        drives = Drives(Rates.of(machine, max(1, directories)), tuning.queue_depth)
    clock = Clock(drives)
    metrics = VirtualMetrics(clock)
    store = VirtualStore(clock, metrics) if drives is not None else None
    device = transfer = None
    if work.device != "cpu":
        largest = max((unit.nbytes for unit in work.units), default=0)
        waiting = min(largest, READS_IN_FLIGHT_BYTES)
        device = VirtualDevice(clock, CopyRates.of(machine), metrics, waiting)
        transfer = VirtualTransfer(device, work.device) if work.units else None
    memory = transfer.memory if transfer is not None else None
    world = VirtualWorld(clock, metrics, speeds, store, None, device, memory)
    if work.units:
        limit = _device_bytes(plan.budgets, machine)
        on = None
        if transfer is not None:
            gauge = cast("DeviceGauge", VirtualGauge(transfer.memory))
            on = Device(cast("DeviceTransfer", transfer), limit, gauge)
        world.residency = make_residency(
            units_of(work.units),
            cast("Pool", VirtualPool(max(plan.shares.params, PIECE_ALIGN))),
            cast("DiskStore", store),
            metrics,
            VirtualPlaceholderOwner(),
            tuning.prefetch_depth,
            on,
            now_s=lambda: clock.now_s,
            checksum=VirtualChecksum(clock, speeds.memory_bytes_per_s),
        )
    return world


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
