"""Collect the rows of a benchmark session and write them down at its end, if all went well."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "examples"))  # their GPT is trained here, too
from checkpoint_results import CheckpointResults, write_checkpoint
from large_results import LargeRun, write_large
from model_results import write_model
from predict_results import Predictions, write_predictions
from ranks_results import RankRow, write_ranks
from results import Row, write
from store_results import StoreRow, write_store
from wrap_contest import Sitting
from wrap_results import write_wrap

ROWS = pytest.StashKey[list[Row]]()
STORE_ROWS = pytest.StashKey[list[StoreRow]]()
SITTINGS = pytest.StashKey[list[Sitting]]()
MODEL_SITTINGS = pytest.StashKey[list[Sitting]]()
PREFETCH_SITTINGS = pytest.StashKey[list[Sitting]]()
LARGE_RUNS = pytest.StashKey[list[LargeRun]]()
RANK_ROWS = pytest.StashKey[list[RankRow]]()
CHECKPOINT = pytest.StashKey[CheckpointResults]()
PREDICTIONS = pytest.StashKey[list[Predictions]]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[Row]:
    torch.manual_seed(20261116)
    return pytestconfig.stash.setdefault(ROWS, [])


@pytest.fixture(scope="session")
def store_table(pytestconfig: pytest.Config) -> list[StoreRow]:
    return pytestconfig.stash.setdefault(STORE_ROWS, [])


@pytest.fixture(scope="session")
def wrap_table(pytestconfig: pytest.Config) -> list[Sitting]:
    return pytestconfig.stash.setdefault(SITTINGS, [])


@pytest.fixture(scope="session")
def model_table(pytestconfig: pytest.Config) -> list[Sitting]:
    return pytestconfig.stash.setdefault(MODEL_SITTINGS, [])


@pytest.fixture(scope="session")
def prefetch_table(pytestconfig: pytest.Config) -> list[Sitting]:
    return pytestconfig.stash.setdefault(PREFETCH_SITTINGS, [])


@pytest.fixture(scope="session")
def large_table(pytestconfig: pytest.Config) -> list[LargeRun]:
    return pytestconfig.stash.setdefault(LARGE_RUNS, [])


@pytest.fixture(scope="session")
def ranks_table(pytestconfig: pytest.Config) -> list[RankRow]:
    return pytestconfig.stash.setdefault(RANK_ROWS, [])


@pytest.fixture(scope="session")
def checkpoint_results(pytestconfig: pytest.Config) -> CheckpointResults:
    return pytestconfig.stash.setdefault(CHECKPOINT, CheckpointResults())


@pytest.fixture(scope="session")
def predict_results(pytestconfig: pytest.Config) -> list[Predictions]:
    return pytestconfig.stash.setdefault(PREDICTIONS, [])


@pytest.fixture(scope="module")
def bench_directory() -> Path:
    """Make the directory that the benchmarks of a file share; they remove their files."""
    path = Path(os.environ.get("OFFLOAD_BENCH_DIR") or "build/bench").absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(os.environ.get("OFFLOAD_BENCH_DIR") or "build/bench").absolute()
    path.mkdir(parents=True, exist_ok=True)
    yield path
    for left in path.glob("*.bench"):
        left.unlink()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down the rows; a session that failed or was interrupted leaves the last good ones."""
    stash = session.config.stash
    if exitstatus != pytest.ExitCode.OK:
        report(session.config, "nothing was written: the session failed or was interrupted")
        return
    if rows := stash.get(ROWS, []):
        report_file(session.config, write("kernels", "make bench", rows))
    if store_rows := stash.get(STORE_ROWS, []):
        report_file(session.config, write_store("make bench", store_rows))
    if sittings := stash.get(SITTINGS, []):
        report_file(session.config, write_wrap("make bench", sittings))
    if sittings := stash.get(MODEL_SITTINGS, []):
        report_file(session.config, write_model("model", "make bench", sittings))
    if sittings := stash.get(PREFETCH_SITTINGS, []):
        report_file(session.config, write_model("prefetch", "make bench", sittings))
    checkpoint = stash.get(CHECKPOINT, None)
    if checkpoint is not None and checkpoint.saves:
        report_file(session.config, write_checkpoint("make bench ONLY=checkpoint", checkpoint))
    if rank_rows := stash.get(RANK_ROWS, []):
        report_file(session.config, write_ranks("make bench ONLY=ranks", rank_rows))
    for predictions in stash.get(PREDICTIONS, []):
        report_file(session.config, write_predictions("make bench ONLY=predict", predictions))
    for run in stash.get(LARGE_RUNS, []):
        report_file(session.config, write_large("make bench", run))


def report_file(config: pytest.Config, path: Path) -> None:
    report(config, f"{path.read_text()}\nwritten: {path.relative_to(config.rootpath)}")


def report(config: pytest.Config, text: str) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{text}")
