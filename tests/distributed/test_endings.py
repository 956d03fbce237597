"""Processes that train together end as any program does, with open optimizers and models or with
closed ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import children

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
WAYS = ["wrap closed", "wrap open", "wrap alone", "prepare closed", "prepare open"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run each program; return the folder with its output and its exit code. A fresh interpreter,
    in which offload was not imported, has forked them.
    """
    folder = tmp_path_factory.mktemp("ended")
    with subprocess.Popen(
        children.program("support.ranks.ending_loop", folder, *WAYS),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as program:
        try:
            assert program.wait(240) == 0
        finally:
            if program.returncode is None:
                os.killpg(program.pid, signal.SIGKILL)
    return folder


def said_and_code(folder: Path, name: str) -> tuple[str, str]:
    return (folder / f"{name}.txt").read_text(), (folder / f"{name}.code").read_text()


@pytest.mark.parametrize("how", WAYS)
def test_the_end_of_the_interpreter(ended: Path, how: str) -> None:
    """A thread of ours, or of our connections, that wants the GIL at that moment would abort it;
    so none is left by then, which the program looks at itself.
    """
    found = [said_and_code(ended, f"{how} {rank}") for rank in (0, 1)]
    assert [code for _, code in found] == ["0", "0"], "\n".join(said for said, _ in found)


def test_what_is_under_way_at_the_end_is_waited_for(ended: Path) -> None:
    assert said_and_code(ended, "worker") == ("done and over", "0")
