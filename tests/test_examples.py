"""Every example runs as a newcomer would run it, for a few steps: it learns, and it offloads."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support import children

EXAMPLES = Path(__file__).parent.parent / "examples"
RUNNABLE = sorted(
    path
    for path in EXAMPLES.glob("*.py")
    if "__main__" in path.read_text()
    # See test_documents.py, test_demo.py, and distributed/test_example.py.
    and path.name not in ("train_gpt.py", "demo.py", "under_limit.py", "train_gpt_ranks.py")
)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
STEPS = 4


@pytest.mark.timeout(200)
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_it_learns_with_most_of_the_model_on_disk(path: Path, tmp_path: Path) -> None:
    needed = re.findall(r"^from (transformers|peft)\b", path.read_text(), re.M)
    for package in needed:
        pytest.importorskip(package)
    done = children.run(
        [sys.executable, "-W", "error", path, str(STEPS)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
        env={**os.environ, **OFFLINE, "TMPDIR": str(tmp_path)},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    losses = re.search(r"^loss ([\d.]+) -> ([\d.]+) in (\d+) steps$", done.stdout, re.M)
    assert losses, said
    assert float(losses[2]) < float(losses[1]) and int(losses[3]) == STEPS, said
    places = re.findall(r"on disk: ([\d.]+) MiB; read [\d.]+ [MG]iB, written", done.stdout)
    taken = re.findall(r"host memory taken: ([\d.]+) MiB", done.stdout)
    assert len(places) == len(taken) >= 1, said
    for on_disk, in_memory in zip(places, taken, strict=True):
        assert float(on_disk) > float(in_memory) / 2, said
    left = [path for path in tmp_path.iterdir() if "inductor" not in path.name]  # torch's cache
    assert not left
    assert "differs" not in said and ": False" not in said


def test_all_are_run_and_short() -> None:
    assert len(RUNNABLE) >= 7
    for path in RUNNABLE:
        assert len(path.read_text().splitlines()) < 100, f"{path.name}: too long to be read at once"
