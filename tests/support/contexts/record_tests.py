"""A pytest plugin that tells the recorder which test runs, and writes how long each test took."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import recorder

_seconds: dict[str, float] = defaultdict(float)


def _beside(suffix: str) -> Path:
    return Path(f"{os.environ[recorder.DATA]}-{os.getpid()}.{suffix}")


def pytest_configure(config: pytest.Config) -> None:
    recorder.tell(str(_beside("now")))


def pytest_collection_finish(session: pytest.Session) -> None:
    recorder.run_in_this_thread()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    recorder.switch(f"{item.nodeid}|setup")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    recorder.switch(f"{item.nodeid}|run")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    recorder.switch(f"{item.nodeid}|teardown")
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    _beside("durations").write_text(json.dumps(_seconds))
