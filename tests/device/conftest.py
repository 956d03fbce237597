"""Tests on the fake accelerator, each under every schedule, in a process of their own.

The device is registered for the life of the process, so these tests carry the mark `device`, which
an ordinary run leaves out; `make test` runs them in a second process, `make test-device` alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from fake_accelerator import DeviceModule, load
from fake_accelerator.train_case import SCHEDULES

NAMES = [f"{name}-{seed}" for name, seed in SCHEDULES]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/device/" in item.path.as_posix():
            item.add_marker(pytest.mark.device)


@pytest.fixture(params=SCHEDULES, ids=NAMES)
def fake(request: pytest.FixtureRequest) -> Iterator[DeviceModule]:
    """The device under one schedule, with nothing allocated and nothing counted."""
    module = load(*request.param)
    torch.set_num_threads(1)
    yield clean(module)
    torch.accelerator.synchronize()
    clean(module)


def clean(module: DeviceModule) -> DeviceModule:
    gc.collect()
    torch.accelerator.empty_cache()
    module.reset_counters()
    return module
