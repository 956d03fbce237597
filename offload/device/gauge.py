"""How much memory of a device is in use, by what, and by how much that grows in between.

The allocator's counters are read, never reset: they are the user's, too. So a peak is known exactly
when it is the highest so far; otherwise what was allocated in between bounds it from above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.device.buffer import DeviceMemory
from offload.device.checks import indexed, own_index

_LEAVE_SHARE = 0.1  # of what is free, where nobody says how much is to be used


@dataclass(frozen=True)
class DeviceReading:
    """Bytes of this process on the device: now, at most so far, and of all allocations ever."""

    now: int
    peak: int
    ever: int

    def growth_until(self, later: DeviceReading) -> int:
        """How far above `now` it was at most before `later`: exactly, or an upper bound."""
        allocated = later.ever - self.ever
        if later.peak > self.peak:
            return later.peak - self.now
        if later.peak < self.peak:  # somebody has reset the counter
            return allocated
        return min(allocated, later.peak - self.now)


class DeviceGauge:
    """Of one device. memory: what of it is ours to give back."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._index = memory.device.index

    def read(self) -> DeviceReading:
        stats = _stats(self._index)
        return DeviceReading(stats["current"], stats["peak"], stats["allocated"])

    def others_bytes(self, reading: DeviceReading) -> int:
        """What is in use beside our memory: activations, gradients, other models."""
        return max(0, reading.now - self._memory.used_bytes)


def find_device(wanted: torch.device | str) -> torch.device:
    """The device that is meant, with its number; "auto": the accelerator that torch has, else the
    CPU.
    """
    if wanted == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        wanted = torch.device("cpu" if found is None else f"{found.type}:{own_index()}")
    device = torch.device(wanted)
    return device if device.type == "cpu" else indexed(device)


def used_bytes(device: torch.device) -> int:
    """Of this process, now. Cheap enough to be asked while things happen."""
    return int(_stats(device.index)["current"])


def _stats(index: int) -> dict[str, int]:
    if not torch._C._accelerator_isAllocatorInitialized():
        return {"current": 0, "peak": 0, "allocated": 0}
    # The public call makes a flat dictionary of some hundred numbers, in ten times the time.
    found: dict[str, dict[str, dict[str, int]]] = torch._C._accelerator_getDeviceStats(index)
    return found["allocated_bytes"]["all"]


def available_bytes(device: torch.device) -> int:
    """All that this process could hold on the device: what it has, and what is free."""
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free + torch.accelerator.memory_reserved(device))


def usable_bytes(device: torch.device) -> int:
    """What it may well hold: not quite all, for the device's libraries take some by themselves."""
    return int(available_bytes(device) * (1 - _LEAVE_SHARE))
