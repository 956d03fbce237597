"""Collects the rows of a benchmark session and writes them down at its end, if all went well."""

from __future__ import annotations

import pytest
import torch
from results import Row, write

ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[Row]:
    torch.manual_seed(20261116)
    return pytestconfig.stash.setdefault(ROWS, [])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session that failed or was interrupted leaves the last good results as they are."""
    rows = session.config.stash.get(ROWS, [])
    if exitstatus != pytest.ExitCode.OK:
        report(session.config, "nothing was written: the session failed or was interrupted")
    elif rows:
        path = write("kernels", "make bench", rows)
        where = path.relative_to(session.config.rootpath)
        report(session.config, f"{path.read_text()}\nwritten: {where}")


def report(config: pytest.Config, text: str) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{text}")
