"""Shared set-up: one seed for everything, printed with every failure."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offload.budget import HOST, Budget

# Whoever runs the tests may have a profile of the machine: the tests must not run by it.
CONFIG = tempfile.mkdtemp(prefix="offload-no-config-")
os.environ["XDG_CONFIG_HOME"] = CONFIG

# What a shell runs in the background ignores Ctrl-C, and so would all programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = int(os.environ.get("OFFLOAD_TEST_SEED", "20261116"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"offload: seed {SEED} (change it with OFFLOAD_TEST_SEED), torch {torch.__version__}"


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(CONFIG, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """What is there by now, most of it by imports, stays for good. Every `gc.collect()` of a test
    that looks for leaks would walk over it, and take a hundred times as long as for what the tests
    make.
    """
    gc.collect()
    gc.freeze()
    if HOST.used_bytes == 0:  # the last limit of a module before is not this one's
        HOST.limit(None)


@pytest.fixture(autouse=True)
def seed() -> int:
    random.seed(SEED)
    np.random.seed(SEED % 2**32)
    torch.manual_seed(SEED)
    print(f"seed {SEED}")
    return SEED


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A test may change the number of threads; the next one starts with what was there."""
    from offload import kernels

    ours, torchs = kernels.num_threads(), torch.get_num_threads()
    yield
    torch.set_num_threads(torchs)
    if kernels.native_error() is None:
        kernels.set_num_threads(ours)


@pytest.fixture(autouse=True)
def sizes_as_before() -> Iterator[None]:
    """Tests make chunks and units small; one that leaves them so would fail others, far away."""
    from offload import planner, units

    places = ((planner, "CHUNK_NUMEL"), (planner, "LEAST_CHUNK_NUMEL"), (units, "LARGE_BYTES"))
    before = [getattr(module, name) for module, name in places]
    yield
    assert [getattr(module, name) for module, name in places] == before


def use_own_budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    budget = Budget()
    for name in ("limits", "optim.session", "optim.ground", "prepared"):
        monkeypatch.setattr(f"offload.{name}.HOST", budget)
    return budget


@pytest.fixture(scope="module", autouse=True)
def budget_of_the_module() -> Iterator[None]:
    """In the budget of the process are pools that other tests have had to give up, because an
    operation on them never ended: whoever comes later would find too little.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_own_budget(monkeypatch)
        yield


@pytest.fixture
def own_budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    """A budget of host bytes for wrapped optimizers in this test alone."""
    return use_own_budget(monkeypatch)


@pytest.fixture
def nothing_is_left(own_budget: Budget, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small chunks, and no host memory is held when the test has ended."""
    monkeypatch.setattr("offload.planner.CHUNK_NUMEL", 1024)
    yield
    gc.collect()
    assert own_budget.used_bytes == 0
