"""The accelerators of this machine: which one is wanted, how much of its memory is in use, by what,
how much that grows between reads, and the states of its random number generators (RNG).

The allocator's counters are read and never reset: the user's code reads them, too. So a peak is
known exactly if it is the highest so far; otherwise the bytes allocated in between are its upper
bound.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from offload.core.errors import ConfigError
from offload.device.buffer import DeviceMemory

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


def indexed(device: torch.device) -> torch.device:
    """Return `device` with its index: `cuda` is the current one. Raises `ConfigError` if torch sees
    no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        there = "the CPU alone" if accelerator is None else accelerator.type
        raise ConfigError(
            f"device: expected {there} here, got {device}; torch sees no such device: `offload "
            "doctor` tells what it sees, and a build of torch for it is at pytorch.org"
        )
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def own_index() -> int:
    """Return the index of the current device. If that is 0, as when the user's code has set none,
    and torchrun has started this rank, return its local rank if it sees that many devices: all
    ranks would be on the first device otherwise.
    """
    current, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdecimal() and int(local) < torch.accelerator.device_count():
        return int(local)
    return current


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


def _module() -> ModuleType | None:
    """Return torch's module of the accelerator, if it is initialised and has RNG states."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    needed = ("get_rng_state", "set_rng_state", "device_count")
    is_begun = getattr(module, "is_initialized", lambda: True)
    return module if all(hasattr(module, name) for name in needed) and is_begun() else None


def device_random_states() -> list[bytes]:
    """Return the RNG state of each device. The list is empty if there is no accelerator, or this
    process has not used it yet.
    """
    module: Any = _module()
    if module is None:
        return []
    return [bytes(module.get_rng_state(n).tolist()) for n in range(module.device_count())]


def set_device_random_states(states: list[bytes]) -> None:
    """Restore the RNG states, one per device; ignore those beyond the number of devices."""
    module: Any = _module()
    if module is None:
        return
    for number, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), number)
