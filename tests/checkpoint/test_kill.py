"""A training that is killed while it saves, thousands of times: nothing acknowledged is ever lost,
nothing torn is ever taken for whole, nothing is left on the disk. support/kill_loop.py does it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import children
from support.loops import chosen, tally

from offload.checkpoint.disk import POINTS

KILLS = chosen(test=52, torture=3000, quick=len(POINTS))
WAYS = chosen(test=4, torture=4, quick=1)  # wrapped or prepared, in the background or not


def run(folder: Path, kills: int, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = children.program("support.kill_loop", folder, kills, seed, *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return children.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.quick
@pytest.mark.timeout(max(300, KILLS * 2))
def test_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    done = run(tmp_path, KILLS, seed, *(["one way"] if WAYS == 1 else []))
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    print(seen)
    tally("kills", seen["kills"])
    assert seen["kills"] >= KILLS
    assert set(seen["at_points"]) == set(POINTS)
    # Only the kills at points are certain to be in a save; where a random kill falls is not.
    assert seen["in_a_save"] >= WAYS * (len(POINTS) - 4)
    assert seen["newer"] > 0 and seen["saves"] > 0


def test_a_loop_that_acknowledges_too_early_is_found_out(tmp_path: Path, seed: int) -> None:
    done = run(tmp_path, 22, seed, "early")
    assert done.returncode == 1
    assert "was acknowledged" in done.stderr or "is lost" in done.stderr, done.stderr[-4000:]
