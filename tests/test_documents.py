"""What the documents show runs as printed, their links lead somewhere, results are of good runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support import children

import offload.__main__

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```", re.M | re.S)
BLOCKS = [
    pytest.param(
        block,
        id=f"{path.name}-{number}",
        marks=[pytest.mark.quick] if path.name == "README.md" else [],
    )
    for path in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block: str, tmp_path: Path) -> None:
    done = children.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # some make a directory and leave it
    )
    assert done.returncode == 0, done.stderr


def shell_lines() -> list[str]:
    """List every line of every block that is for a shell, each once."""
    blocks = [
        text
        for path in DOCUMENTS
        for language, text in FENCE.findall(path.read_text())
        if language == "sh"
    ]
    return list(dict.fromkeys(line for text in blocks for line in text.splitlines() if line))


PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
COMMANDS = [line for line in shell_lines() if line.startswith("offload ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with what the documents' commands name: a loop, its trace, a checkpoint."""
    directory = tmp_path_factory.mktemp("documents")
    (directory / "train.py").write_text(LOOP)
    children.run([sys.executable, "train.py"], cwd=directory, check=True, timeout=120)
    shutil.copy(directory / "trace.json", directory / "before.json")
    (directory / "my_model.py").write_text(MODEL)
    return directory


MODEL = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/commands.md").read_text(), re.M | re.S)[
    0
]
LOOP = """
import pathlib
import shutil

import torch
from torch import nn

import offload

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = offload.prepare(model, optimizer, host_memory="512KiB", nvme=".")
for step in range(40):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
offload.report(model).save_trace("trace.json")
shutil.rmtree("ckpt", ignore_errors=True)
pathlib.Path("ckpt").mkdir()
offload.save("ckpt/40", model, optimizer)
"""


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, in a directory that has what they name. All checks of `offload selftest` are run
    by test_selftest.py.
    """
    monkeypatch.setenv("PATH", PATH)
    _, *words = shlex.split(line, comments=True)
    if words[0] == "selftest":
        words += ["--only", "kernels.slices"]
    command = [sys.executable, "-m", "offload", *words]
    done = children.run(
        command, nested=True, cwd=place, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_program_is_the_module() -> None:
    """`offload ...` is `python -m offload ...`, which the commands above are run as."""
    (script,) = entry_points(group="console_scripts", name="offload")
    assert script.load() is offload.__main__.main
    done = subprocess.run(
        [shutil.which("offload", path=PATH), "--help"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and "selftest" in done.stdout


@pytest.mark.quick
def test_every_block_is_of_a_kind_that_is_tested() -> None:
    """Plain blocks show what is printed, or commands that need what a test has not."""
    for path in DOCUMENTS:
        for language, _ in FENCE.findall(path.read_text()):
            known = ("", "python", "sh", "py")  # py: a program, which test_format.py runs
            assert language in known, f"{path.name}: a block of {language!r}"
    for line in shell_lines():
        assert line.startswith(("offload ", "make ", "#")), line


@pytest.mark.quick
def test_messages_that_trouble_shooting_quotes_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "offload").rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", sources)  # texts that go over several lines
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", text)
    assert len(quoted) > 20
    assert [words for words in quoted if words.strip() not in code] == []


def test_every_picture_in_the_documents_is_made_by_a_target() -> None:
    maker = (ROOT / "benchmarks" / "pictures.py").read_text()
    for path in DOCUMENTS:
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text()):
            picture = (path.parent / target).resolve()
            assert picture.parent == ROOT / "docs" / "pictures", target
            assert picture.name in maker, target


@pytest.mark.quick
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_exist(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


FOREIGN = {"zero_to_fp32.py"}  # DeepSpeed's
MADE = {"dist/"}  # by a target of make


@pytest.mark.quick
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    """`params/block.py`, `offload/storage/`, `test_wrap`: whole, or as the end of a path."""
    folders = ("offload", "kernels", "tests", "docs", "benchmarks", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    files += [file for file in ROOT.iterdir() if file.is_file()]
    names = {f"/{file.relative_to(ROOT).as_posix()}" for file in files}
    names |= {f"{name.rpartition('/')[0]}/" for name in names}
    stems = {file.stem for file in files}
    text = path.read_text()
    for named in re.findall(r"`([\w./]+(?:\.(?:py|cpp|h|js|css|md)|/))`", text):
        is_there = any(name.endswith(f"/{named.removeprefix('/')}") for name in names)
        assert is_there or named in FOREIGN | MADE, named
    for named in re.findall(r"`(?:\w+/)?(test_\w+)`", text):
        assert named in stems, named


@pytest.mark.quick
def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        named |= set(re.findall(r"^make ([a-z-]+)", path.read_text(), re.M))
        assert named <= targets, f"{path.name}: no target {sorted(named - targets)}"


def test_the_example_trains_to_the_bit(tmp_path: Path) -> None:
    said = []
    for kind in (["--in-memory"], [f"--nvme={tmp_path}", "--host-memory=40MiB"]):
        done = children.run(
            [sys.executable, "examples/train_gpt.py", "--steps=5", "--layers=1", *kind],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
        assert "step 5/5 | loss " in done.stdout
    losses, parameters = zip(
        *(
            re.search(r"^(loss .*)\nparameters: ([0-9a-f]{16})$", text, re.M).groups()
            for text in said
        ),
        strict=True,
    )
    assert len(set(losses)) == len(set(parameters)) == 1, said
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", losses[0]).groups())
    assert last < first
    assert re.search(r"^disk, in use +[1-9]", said[1], re.M) and "fall-backs" in said[1]
    assert not list(tmp_path.iterdir())


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
    (tmp_path / "predict_results.py").write_text(
        "Predictions = str\ndef write_predictions(): ...\n"
    )
    (tmp_path / "wrap_contest.py").write_text("Sitting = str\n")
    (tmp_path / "wrap_results.py").write_text("def write_wrap(): ...\n")
    (tmp_path / "test_both.py").write_text(
        "def test_first(table):\n    table.append('row')\n"
        f"def test_second(table):\n    table.append('row')\n    {second}\n"
    )
    done = children.run(
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
