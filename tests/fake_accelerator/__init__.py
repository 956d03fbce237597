"""A fake accelerator: ``torch.device("fake")``, on which a missing wait fails every time."""

from __future__ import annotations

import os
import sys

import torch

from .build import library
from .device import DeviceModule

__all__ = ["DeviceModule", "load"]

_module: DeviceModule | None = None


def load(
    schedule: str | None = None, seed: int | None = None, budget_bytes: int | None = None
) -> DeviceModule:
    """Register the device in this process, for good, and set it up; a later call sets it up anew.

    An argument that is not given comes from the environment: FAKE_ACCELERATOR_SCHEDULE (eager,
    lazy, seeded), FAKE_ACCELERATOR_SEED and FAKE_ACCELERATOR_BUDGET (bytes a device; 1 GiB if not
    set).
    """
    global _module
    if _module is None:
        torch.ops.load_library(library())
        torch.utils.rename_privateuse1_backend("fake")
        module = DeviceModule()
        torch._register_device_module("fake", module)
        _module = module
    environment = os.environ.get
    schedule = schedule or environment("FAKE_ACCELERATOR_SCHEDULE", "eager")
    seed = int(environment("FAKE_ACCELERATOR_SEED", "0")) if seed is None else seed
    if budget_bytes is None:
        budget_bytes = int(environment("FAKE_ACCELERATOR_BUDGET", str(1 << 30)))
    _module.set_schedule(schedule, seed)
    # Streams have their bits of the seed from when they are made.
    if kept := sys.modules.get("offload.device.streams"):
        kept.forget()
    _module.set_budget(budget_bytes)
    return _module
