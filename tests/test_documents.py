"""What the documents show runs as printed, their links lead somewhere, results are of good runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_exist(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        named |= set(re.findall(r"^make ([a-z-]+)", path.read_text(), re.M))
        assert named <= targets, f"{path.name}: no target {sorted(named - targets)}"


def test_the_example_trains_to_the_bit(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    done = subprocess.run(
        [
            sys.executable,
            "examples/train_gpt.py",
            "--steps",
            "6",
            "--layers",
            "1",
            "--picture",
            picture,
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every loss and every parameter equals torch's, bit for bit" in done.stdout
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("second", "code", "written"),
    [("assert True", 0, True), ("assert False", 1, False), ("raise KeyboardInterrupt", 2, False)],
)
def test_benchmarks_write_results_of_good_sessions_only(
    tmp_path: Path, second: str, code: int, written: bool
) -> None:
    shutil.copy(ROOT / "benchmarks" / "conftest.py", tmp_path)
    (tmp_path / "results.py").write_text(
        "from pathlib import Path\n"
        "Row = str\n"
        "def write(name, command, rows):\n"
        "    path = Path(__file__).with_name('results.md')\n"
        "    path.write_text(' '.join(rows))\n"
        "    return path\n"
    )
    (tmp_path / "store_results.py").write_text("StoreRow = str\ndef write_store(): ...\n")
    (tmp_path / "checkpoint_results.py").write_text(
        "CheckpointResults = str\ndef write_checkpoint(): ...\n"
    )
    (tmp_path / "ranks_results.py").write_text("RankRow = str\ndef write_ranks(): ...\n")
    (tmp_path / "large_results.py").write_text("LargeRun = str\ndef write_large(): ...\n")
    (tmp_path / "model_results.py").write_text("def write_model(): ...\n")
    (tmp_path / "wrap_contest.py").write_text("Sitting = str\n")
    (tmp_path / "wrap_results.py").write_text("def write_wrap(): ...\n")
    (tmp_path / "test_both.py").write_text(
        "def test_first(table):\n    table.append('row')\n"
        f"def test_second(table):\n    table.append('row')\n    {second}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_both.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "results.md").exists() is written
    expected = (
        "row row\nwritten: results.md" if written else "nothing was written: the session failed"
    )
    assert expected in done.stdout
