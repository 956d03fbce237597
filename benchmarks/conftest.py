"""Collects the rows of a benchmark session and writes them down at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from results import Row, write


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Iterator[list[Row]]:
    torch.manual_seed(20261116)
    rows: list[Row] = []
    yield rows
    if rows:
        path = write("kernels", "make bench", rows)
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n\n{path.read_text()}\nwritten: {path.relative_to(pytestconfig.rootpath)}")
