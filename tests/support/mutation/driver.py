"""A program that runs chosen tests of a checkout with its own Python, until one fails:
`python driver.py CHOSEN TOLD [options of pytest]`.

CHOSEN: a JSON list of node ids, in the order in which they run. TOLD: a file in which it notes the
test that runs, the one that has failed, and files that cannot be imported; the others run all the
same. Needs nothing but pytest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

_LONGEST = 2000  # of a traceback, characters


class Chosen:
    """A pytest plugin that runs only these tests, in this order, and notes missing ones."""

    def __init__(self, nodeids: list[str], told: Path) -> None:
        self._order = {nodeid: number for number, nodeid in enumerate(nodeids)}
        self._told = told
        self._state: dict[str, object] = {}
        self._uncollected: dict[str, str] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def _tell(self, **what: object) -> None:
        self._state |= what
        self._told.write_text(json.dumps(self._state))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item], config: pytest.Config
    ) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])
        self._tell(missing=sorted(set(self._order) - {item.nodeid for item in items}))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._uncollected[report.nodeid] = str(report.longrepr)[-_LONGEST:]
            self._tell(uncollected=self._uncollected)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(running=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "failed" not in self._state:
            self._tell(failed=report.nodeid, why=str(report.longrepr)[-_LONGEST:])
            self._session.shouldstop = "one has failed"

    def pytest_sessionfinish(self) -> None:
        self._tell(is_finished=True)


def main(chosen: str, told: str, *options: str) -> int:
    nodeids = json.loads(Path(chosen).read_text())
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it
    files = list(dict.fromkeys(nodeid.partition("::")[0] for nodeid in nodeids))
    # Not -x, which would also end with the first file that cannot be imported.
    words = [*files, "--continue-on-collection-errors", "-q", "-p", "no:cacheprovider", *options]
    return int(pytest.main(words, plugins=[Chosen(nodeids, Path(told))]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
