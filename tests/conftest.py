"""Shared set-up: one seed for everything, printed with every failure."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would import it, after `little_to_collect`
from hypothesis import settings
from support.interrupts import heed_interrupts
from support.leftovers import await_nothing_held
from support.loops import LOOP, SEED, SHUFFLE, counted
from support.loops import settings as settings_of_the_run

from offload.core.budget import HOST, Budget

# The user may have a profile of the machine: the tests must not run by it.
CONFIG = tempfile.mkdtemp(prefix="offload-no-config-")
os.environ["XDG_CONFIG_HOME"] = CONFIG

heed_interrupts()

SECONDS = Path(__file__).with_name("seconds.json")  # of each file, for the longest first
_spent: Counter[str] = Counter()

settings.register_profile(
    "offload", deadline=None, derandomize=True, database=None, print_blob=True
)
settings.load_profile("offload")


def pytest_report_header(config: pytest.Config) -> str:
    return f"offload: loop {LOOP}, {settings_of_the_run()}, torch {torch.__version__}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help=f"write {SECONDS.name}")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # Each worker has a core. Two teams of threads on two cores would wait for each other.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this loop does not run, and begin with the files that take longest."""
    if LOOP != "torture":
        leave_out(config, items, lambda item: item.get_closest_marker("torture") is not None)
    if LOOP == "quick":
        leave_out(config, items, lambda item: item.get_closest_marker("quick") is None)
    if SHUFFLE:
        shuffle(items, random.Random(SHUFFLE))
    else:
        seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def leave_out(config: pytest.Config, items: list[pytest.Item], is_out: Any) -> None:
    out = [item for item in items if is_out(item)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if not is_out(item)]


def shuffle(items: list[pytest.Item], draw: random.Random) -> None:
    """Put the files, and the tests of each, in any order."""
    files = sorted({file_of(item.nodeid) for item in items})
    place = dict(zip(files, draw.sample(range(len(files)), len(files)), strict=True))
    draw.shuffle(items)
    items.sort(key=lambda item: place[file_of(item.nodeid)])


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[file_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was counted to the process that prints it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["counted"] = dict(counted)
    elif session.config.getoption("--record-seconds"):
        known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        known |= {file: round(spent, 1) for file, spent in _spent.items()}
        here = Path(__file__).parent.parent
        known = {file: known[file] for file in sorted(known) if (here / file).exists()}
        SECONDS.write_text(json.dumps(known, indent=1) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    counted.update(getattr(node, "workeroutput", {}).get("counted", {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(CONFIG, ignore_errors=True)
    if counted and not hasattr(config, "workerinput") and "OFFLOAD_TEST_COUNTS" in os.environ:
        Path(os.environ["OFFLOAD_TEST_COUNTS"]).write_text(json.dumps(counted))


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Freeze what is there by now, most of it by imports, which stays for good. Every
    `gc.collect()` of a test that looks for leaks would walk over it, and take a hundred times as
    long as for what the tests make.
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
    print(f"seed {SEED}" + (f", order {SHUFFLE}" if SHUFFLE else ""))
    return SEED


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads, which a test may change."""
    from offload import kernels

    ours, torchs = kernels.num_threads(), torch.get_num_threads()
    yield
    torch.set_num_threads(torchs)
    if kernels.native_error() is None:
        kernels.set_num_threads(ours)


@pytest.fixture(autouse=True)
def sizes_as_before() -> Iterator[None]:
    """Check that the test restored the sizes of chunks and units that it made small: it would fail
    other tests, far away.
    """
    from offload.params import units
    from offload.planning import planner

    places = ((planner, "CHUNK_NUMEL"), (planner, "LEAST_CHUNK_NUMEL"), (units, "LARGE_BYTES"))
    before = [getattr(module, name) for module, name in places]
    yield
    assert [getattr(module, name) for module, name in places] == before


def use_own_budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    budget = Budget()
    for name in (
        "planning.limits",
        "optim.coordinator",
        "params.prepared",
        "telemetry.parts",
    ):
        monkeypatch.setattr(f"offload.{name}.HOST", budget)
    return budget


@pytest.fixture(scope="module", autouse=True)
def budget_of_the_module() -> Iterator[None]:
    """Give the module its own budget. In that of the process are pools that other tests have had to
    give up, because an operation on them never ended: later tests would find too little.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_own_budget(monkeypatch)
        yield


@pytest.fixture
def own_budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    """Give this test alone a budget of host bytes for wrapped optimizers."""
    return use_own_budget(monkeypatch)


@pytest.fixture
def nothing_is_left(own_budget: Budget, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make chunks small, and check that no host memory is held when the test has ended."""
    monkeypatch.setattr("offload.planning.planner.CHUNK_NUMEL", 1024)
    yield
    await_nothing_held(own_budget)
