"""The states of the devices' random number generators (RNG), for checkpoints."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


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
