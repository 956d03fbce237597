"""The state of the random numbers that devices draw."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def _module() -> ModuleType | None:
    """Of the accelerator that is in use, if it has random numbers of its own."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    needed = ("get_rng_state", "set_rng_state", "device_count")
    is_begun = getattr(module, "is_initialized", lambda: True)
    return module if all(hasattr(module, name) for name in needed) and is_begun() else None


def device_random_states() -> list[bytes]:
    """One for each device. None where there is no accelerator, or nobody has used it."""
    module: Any = _module()
    if module is None:
        return []
    return [bytes(module.get_rng_state(n).tolist()) for n in range(module.device_count())]


def set_device_random_states(states: list[bytes]) -> None:
    """As many as there are devices; the rest has no place to go to."""
    module: Any = _module()
    if module is None:
        return
    for number, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), number)
