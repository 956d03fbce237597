"""Set-up for tests with third-party packages: off-line, quiet, nothing left behind.

Models are made from a config, data from a seed. What the packages have for the network is switched
off before they are imported, and a connection that is tried all the same is an error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from support.leftovers import await_nothing_held

from offload.core.budget import Budget
from offload.planning import planner

os.environ.update(
    ACCELERATE_USE_CPU="true",
    DO_NOT_TRACK="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    WANDB_MODE="disabled",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integrations/third_party/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"a test tried to reach the network: {args[-1:]}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def nothing_is_left(own_budget: Budget) -> Iterator[None]:
    """Check that no host memory stays in use, also where a trainer holds the optimizer and the test
    does not close it.
    """
    yield
    if own_budget.used_bytes:
        await_nothing_held(own_budget)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that small models have many, too."""
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 4096)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 256)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)
