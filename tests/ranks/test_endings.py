"""Processes that train together end as any program does, whatever they have closed before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import children

pytestmark = pytest.mark.ranks
WAYS = ["wrap closed", "wrap open", "wrap alone", "prepare closed", "prepare open"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", WAYS)
def test_the_end_of_the_interpreter(tmp_path: Path, how: str) -> None:
    """A thread of ours, or of our connections, that wants the GIL at that moment would abort it;
    so none is left by then, which the program looks at itself.
    """
    ranks = [
        subprocess.Popen(
            children.program("support.ranks.ending_loop", rank, tmp_path / "store", how),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


def test_what_is_under_way_at_the_end_is_waited_for() -> None:
    """Though nobody has the worker any more, and its thread is a daemon."""
    program = (
        "import os, time\n"
        "from offload.shard.worker import Worker\n"
        "def act():\n"
        "    time.sleep(0.5)\n"
        "    return lambda: os.write(1, b'done')\n"
        "Worker('slow', at_end=lambda: os.write(1, b' and over')).put(act)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, b"done and over"), done.stderr
