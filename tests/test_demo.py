"""The demo, small: it runs, is killed, goes on, and says when the bits are not the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import children

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ("--steps=10", "--every=3", "--layers=2")


def command(out: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / "demo.py"), *SMALL, f"--out={out}"]


@pytest.mark.timeout(300)
def test_it_is_killed_and_ends_with_the_same_bits_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "build"
    done = children.run(
        command(out), nested=True, capture_output=True, text=True, timeout=280, env=_environment()
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    killed = int(re.search(r"^kill -9 in step (\d+)$", said, re.M)[1])
    assert killed >= 6, "it had begun the sixth"
    assert "left in the swap directory: nothing" in said
    again = int(re.search(r"^goes on after step (\d+)$", said, re.M)[1])
    assert 3 <= again < killed and again % 3 == 0
    assert re.search(rf"^resumed +with step {again + 1};", said, re.M)
    assert "the same to the bit, all" in said and "the same, bit for bit" in said
    first, last = re.search(r"^loss +([\d.]+) -> ([\d.]+), 10 steps$", said, re.M).groups()
    assert float(last) < float(first)
    given, needed, taken = map(
        float, re.search(r"([\d.]+) MiB of.*needs ([\d.]+) MiB; taken ([\d.]+) M", said).groups()
    )
    assert taken <= given < needed / 2
    assert done.stderr.count("step 10/10 | loss ") == 2, "the live line of both that came so far"
    left = sorted(path.name for path in out.iterdir())
    assert left == ["demo.html", "demo.png", "demo_trace.json"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[-1] == f"the page  {out / 'demo.html'}"
    assert json.loads((out / "demo_trace.json").read_text())["offload"]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(120)
def test_it_leaves_nothing_when_it_is_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "build"
    process = children.Popen(
        command(out),
        nested=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )
    try:
        while not (out / "demo" / "plain").exists():  # its child trains
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert list(out.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# --- what it says of runs that are not as they must be --------------------------------------------


class Told:
    """A run, as its log has it."""

    def __init__(self, *losses: float, first: int = 1, **end: Any) -> None:
        self._steps = [{"step": n, "loss": loss} for n, loss in enumerate(losses, start=first)]
        facts = {"digest": "a", "host_bytes": 90, "disk_bytes": 500}
        facts |= {"peak_rss_bytes": 2000, "rss_before_bytes": 1000}
        self._ends = {"needed_bytes": 300, "budget_bytes": 100}, {**facts, **end}

    def steps(self) -> list[dict[str, Any]]:
        return self._steps

    def lines(self) -> list[dict[str, Any]]:
        return [self._ends[0], *self._steps, self._ends[1]]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (Told(3.0, 2.5), Told(2.5, 2.0, first=2), "the same to the bit, all"),
        (Told(3.0, 2.6), Told(2.5, 2.0, first=2), r"differ in steps \[2\]"),
        (Told(3.0, 2.5), Told(2.5, 1.9, first=2), r"differ in steps \[3\]"),
        (Told(3.0, 2.5), Told(2.5, 2.0, first=2, digest="b"), "DIFFERS"),
        (Told(3.0, 2.5), Told(2.5, 2.0, first=2, host_bytes=101), "taken 0.0 MiB"),
    ],
)
def test_what_differs_is_named_and_is_a_failure(
    demo: ModuleType, first: Told, second: Told, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_well = demo.tell(Told(3.0, 2.5, 2.0), first, second)
    assert is_well == (words == "the same to the bit, all")
    said = capsys.readouterr().out
    assert re.search(words, said)
    assert "resumed   with step 2; steps 2 to 2 were run twice" in said


@pytest.mark.quick
def test_a_loss_that_does_not_fall_is_a_failure(demo: ModuleType) -> None:
    assert not demo.tell(Told(3.0, 3.0), Told(3.0), Told(3.0, 3.0))


def test_a_run_that_fails_ends_the_show(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.subprocess, "Popen", children.start)
    run = demo.Run("wrong", tmp_path, "log", ["--no-such-option"])
    with pytest.raises(SystemExit, match=r"train_gpt\.py ended with 2"):
        run.wait()
    with pytest.raises(SystemExit, match=r"train_gpt\.py ended with 2"):
        run.kill_in_step(3)


def test_its_files_are_short_enough_to_be_read() -> None:
    for name in ("demo.py", "demo_picture.py", "train_gpt.py", "gpt.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 150, name


def test_the_text_is_plain_and_enough_to_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from gpt import batches, text

    learned, held_out = text(), text(is_held_out=True)
    written = b"".join(p.read_bytes() for p in sorted((EXAMPLES / "text").glob("*.txt")))
    assert 30_000 < len(learned) + len(held_out) == len(written) < 60_000
    assert written.isascii() and len(held_out) > len(written) // 11
    pieces = [bytes(piece.tolist()) for piece in next(batches(1, 4, 64, seed=3))]
    whole = bytes(learned.tolist())
    assert all(len(piece) == 65 and piece in whole for piece in pieces)
    assert not any(piece in bytes(held_out.tolist()) for piece in pieces)
