"""Measures how much memory of a device is in use, by what, and how much that grows between reads.

It reads the allocator's counters and never resets them: the user's code reads them, too. So a peak
is known exactly if it is the highest so far; otherwise the bytes allocated in between are its upper
bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.device.buffer import DeviceMemory
from offload.device.checks import indexed, own_index

_LEAVE_SHARE = 0.1  # share of the available bytes left free if the user gives no budget


@dataclass(frozen=True)
class DeviceReading:
    """A reading of the bytes that this process has on the device. now: in use; peak: the most so
    far; ever: the sum of all allocations.
    """

    now: int
    peak: int
    ever: int

    def growth_until(self, later: DeviceReading) -> int:
        """Return by how many bytes the use exceeded `now` at most before `later`: the exact number,
        or an upper bound.
        """
        allocated = later.ever - self.ever
        if later.peak > self.peak:
            return later.peak - self.now
        if later.peak < self.peak:  # the user's code has reset the counter
            return allocated
        return min(allocated, later.peak - self.now)


class DeviceGauge:
    """A gauge of the memory in use on one device. memory: the engine's own part of it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._index = memory.device.index

    def read(self) -> DeviceReading:
        stats = _stats(self._index)
        return DeviceReading(stats["current"], stats["peak"], stats["allocated"])

    def others_bytes(self, reading: DeviceReading) -> int:
        """Return the bytes in use beside the engine's own: activations, gradients, other models."""
        return max(0, reading.now - self._memory.used_bytes)


def find_device(wanted: torch.device | str) -> torch.device:
    """Return the wanted device with its index. "auto": the accelerator that torch sees, otherwise
    the CPU.
    """
    if wanted == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        wanted = torch.device("cpu" if found is None else f"{found.type}:{own_index()}")
    device = torch.device(wanted)
    return device if device.type == "cpu" else indexed(device)


def used_bytes(device: torch.device) -> int:
    """Return the bytes that this process uses on the device now. Cheap; call it at any time."""
    return int(_stats(device.index)["current"])


def _stats(index: int) -> dict[str, int]:
    if not torch._C._accelerator_isAllocatorInitialized():
        return {"current": 0, "peak": 0, "allocated": 0}
    # The public call makes a flat dictionary of some hundred numbers and takes ten times as long.
    found: dict[str, dict[str, dict[str, int]]] = torch._C._accelerator_getDeviceStats(index)
    return found["allocated_bytes"]["all"]


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this process could hold on the device: reserved by it, or free."""
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free + torch.accelerator.memory_reserved(device))


def usable_bytes(device: torch.device) -> int:
    """Return the available bytes less `_LEAVE_SHARE`: the device's libraries allocate some, too."""
    return int(available_bytes(device) * (1 - _LEAVE_SHARE))
