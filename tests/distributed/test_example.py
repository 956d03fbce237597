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
from support import children
from support.loops import chosen
from torch.distributed import TCPStore

pytestmark = pytest.mark.ranks
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "train_gpt_ranks.py"
STAGES = ["1", "3", "2", "fsdp"]
BY_TORCHRUN = chosen(test=STAGES[:1], torture=STAGES)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def by_torchrun(count: int, *options: str, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", f"{count}", str(EXAMPLE), *options],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def as_torchrun(count: int, *options: str, folder: Path) -> str:
    """Start the ranks as torchrun starts them, with the store that its agent has, in processes that
    have torch imported.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{store.port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": f"{count}",
        "LOCAL_WORLD_SIZE": f"{count}",
    }
    ranks = [
        children.Popen(
            [sys.executable, str(EXAMPLE), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**ENVIRONMENT, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(count)
    ]
    try:
        told = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * count, told
    return "".join(out for out, _ in told)


@pytest.mark.timeout(700)
def test_every_stage_goes_on_where_another_has_stopped(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    steps, count = 0, 2
    for stage in STAGES:
        steps += 5
        start = by_torchrun if stage in BY_TORCHRUN else as_torchrun
        said = start(
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
