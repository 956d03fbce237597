"""The engine's residency of blocks on a device, in virtual time."""

from __future__ import annotations

from typing import cast

from offload.device import DeviceGauge, DeviceTransfer
from offload.params.copies import Copies
from offload.params.device_budget import DeviceBudget
from offload.params.device_residency import _DEPTH, DeviceResidency
from offload.params.device_tier import DeviceTier
from offload.params.residency import Residency, ResidencyParts
from offload.planning.unit import UnitSizes, on_device_bytes
from offload.tools.forecast.simulation.device import VirtualGauge, VirtualTransfer
from offload.tools.forecast.simulation.residency import VirtualResidency


class VirtualTier(DeviceTier):
    """The device copies of one model's blocks on a virtual device, which no other model uses."""

    def __init__(
        self,
        residency: DeviceResidency,
        transfer: VirtualTransfer,
        limit_bytes: int,
        least_bytes: int,
        parts: ResidencyParts,
        depth: int,
    ) -> None:
        Copies.__init__(self, transfer.device, parts.owner, residency._take_back, residency._lock)
        self.transfer = cast("DeviceTransfer", transfer)
        self.depth = depth
        self._blocks = residency.blocks
        self._sizes = [on_device_bytes(block.nbytes) for block in residency.blocks]
        self._metrics = parts.metrics
        self._buffers, self._uploads = {}, {}
        gauge = cast("DeviceGauge", VirtualGauge(transfer.memory))
        self.device_budget = DeviceBudget(gauge, limit_bytes, least_bytes, len(residency.blocks))

    def _peers(self) -> list[DeviceTier]:
        return []


class VirtualDeviceResidency(VirtualResidency, DeviceResidency):
    """The residency of a model on a virtual device. The prefetch depth of `parts` is how many units
    ahead are uploaded; None: the engine's default. limit_bytes: for everything on the device.
    """

    def __init__(
        self, parts: ResidencyParts, transfer: VirtualTransfer, limit_bytes: int, sizes: UnitSizes
    ) -> None:
        Residency.__init__(self, parts)
        depth = _DEPTH if parts.depth is None else parts.depth
        least = sizes.least_device_bytes
        self.tier = VirtualTier(self, transfer, limit_bytes, least, parts, depth)
        self._foreseen, self._foreseen_at = {}, (-1, -1)
        self._exposed, self._shown, self._original_devices = set(), {}, {}
