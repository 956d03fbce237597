"""The example with several ranks runs as a newcomer would run it, in every stage, and goes on from
a checkpoint that another stage and number of ranks has written.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "train_gpt_ranks.py"


def run(count: int, *options: str, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", f"{count}", str(EXAMPLE), *options],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_every_stage_goes_on_where_another_has_stopped(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    steps, count = 0, 2
    for stage in ("1", "3", "2", "fsdp"):
        steps += 5
        said = run(
            count, "--stage", stage, "--steps", f"{steps}", "--save", str(saves), folder=tmp_path
        )
        found = re.search(r"^loss ([\d.]+) -> ([\d.]+) in (\d+) steps$", said, re.M)
        assert found and int(found[3]) == 5, said
        assert said.count(f"of {count}: state ") == count
        assert (saves / f"{steps}").is_dir()
        if stage == "1":
            assert float(found[2]) < float(found[1])
        count = 5 - count  # 2 and 3


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
