"""Tests on the fake accelerator, each under several schedules, in processes of their own.

The device is registered for the life of the process, so these tests carry the mark `device`, which
an ordinary run leaves out: `pytest -m device tests/device`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from fake_accelerator import DeviceModule, load
from fake_accelerator.train_case import SCHEDULES
from support.loops import chosen, tally
from support.ranks.launch import preload_device

# The ends and two between; `make torture` has all.
CHOSEN = chosen(test=[SCHEDULES[i] for i in (0, 1, 4, 7)], torture=SCHEDULES)
NAMES = [f"{name}-{seed}" for name, seed in CHOSEN]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/device/" in item.path.as_posix():
            item.add_marker(pytest.mark.device)


@pytest.fixture(scope="session", autouse=True)
def ranks_have_the_device() -> None:
    preload_device()


@pytest.fixture(params=CHOSEN, ids=NAMES)
def fake(request: pytest.FixtureRequest) -> Iterator[DeviceModule]:
    """Load the device under one schedule, with nothing allocated and nothing counted."""
    module = load(*request.param)
    tally("schedules")
    torch.set_num_threads(1)
    yield clean(module)
    torch.accelerator.synchronize()
    clean(module)


def clean(module: DeviceModule) -> DeviceModule:
    gc.collect()
    torch.accelerator.empty_cache()
    module.reset_counters()
    return module
