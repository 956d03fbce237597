"""A training that is killed while it saves, hundreds of times: nothing acknowledged is ever lost,
nothing torn is ever taken for whole, nothing is left on the disk. kill_loop.py does it.

OFFLOAD_KILLS: how many times (`make kill`: 3,000).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import children

from offload.checkpoint.disk import POINTS

KILLS = int(os.environ.get("OFFLOAD_KILLS", "208"))


def run(folder: Path, kills: int, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = children.program("support.kill_loop", folder, kills, seed, *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return children.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.timeout(max(300, KILLS * 2))
def test_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    done = run(tmp_path, KILLS, seed)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    print(seen)
    assert seen["kills"] >= KILLS
    assert set(seen["at_points"]) == set(POINTS)
    # At points alone: when random ones come is a matter of time.
    assert seen["in_a_save"] >= 4 * (len(POINTS) - 4)
    assert seen["newer"] > 0 and seen["saves"] > 0


def test_a_loop_that_acknowledges_too_early_is_found_out(tmp_path: Path, seed: int) -> None:
    done = run(tmp_path, 44, seed, "early")
    assert done.returncode == 1
    assert "was acknowledged" in done.stderr or "is lost" in done.stderr, done.stderr[-4000:]
