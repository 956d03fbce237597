"""Contestants of the benchmarks of whole steps: processes that train the same model, a few steps
by turns.

A process of its own gives each its own peak of memory and its own bytes on the drive. Between its
turns it waits on a pipe and uses no core. See `peers/worker.py` for what they say to each other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from disk_contest import MI, Fio

HERE = Path(__file__).parent
START_S, TURN_S = 1800, 300  # DeepSpeed compiles its operators when it is first started
WARM_UP_STEPS = 3  # state is made in the first, DeepSpeed learns the order of modules in two
STEPS_A_TURN = 2
PAUSE_S = 0.2  # threads that still wait in turns for work fall asleep
FIO_CHUNKS_MI = (4, 16)
OURS = ("offload", "prepared")


class PeerFailed(Exception):
    """A process that ended or went silent; the text says what it said last."""


@dataclass(frozen=True)
class Entry:
    """A contestant: `kind` and `options` are those of `peers/contestants.py`. root: the directory
    of another checkout, whose code and environment it uses.
    """

    name: str
    kind: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    root: Path | None = None


@dataclass(frozen=True)
class Step:
    whole_s: float
    optimizer_s: float
    read_bytes: int
    written_bytes: int
    loss: float
    seconds: dict[str, float] = field(default_factory=dict)  # by cause, of ours only
    counts: dict[str, int] = field(default_factory=dict)  # of prepared models only

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


class Worker:
    """The process of one entry."""

    def __init__(self, entry: Entry, directory: Path, warm_up: int = WARM_UP_STEPS) -> None:
        self.entry = entry
        self.log_path = directory / f"{entry.name.replace(' ', '_').replace(',', '')}.log"
        self._log: IO[str] = self.log_path.open("w")
        root = entry.root or HERE.parent
        python = sys.executable if entry.root is None else str(root / ".venv" / "bin" / "python")
        script = root / "benchmarks" / "peers" / "worker.py"
        self.process = subprocess.Popen(
            [python, str(script), entry.kind, json.dumps(entry.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=directory,
            env={**_environment(directory, root), **entry.environment},
        )
        try:
            self.numel = int(self._answer(START_S)["numel"])
            self.run(warm_up)
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> list[Step]:
        return [Step(**found) for found in self._ask({"steps": steps})["steps"]]

    def facts(self) -> dict[str, Any]:
        return self._ask({"facts": True})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the missing answer tells
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer(TURN_S)

    def _answer(self, patience_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], patience_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            said = self.log_path.read_text(errors="replace").strip().splitlines() or ["nothing"]
            how = "ended" if ready else f"gave no answer for {patience_s:.0f} s"
            raise PeerFailed(f"{self.entry.name} {how}; it said last: {said[-1]}")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(60)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._log.close()


def _environment(directory: Path, root: Path) -> dict[str, str]:
    paths = [str(root / "examples"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(directory.parent / "torch_extensions"),
    }


@dataclass
class Runner:
    """One entry's part in a sitting: its turns, of some steps each."""

    entry: Entry
    worker: Worker
    turns: list[list[Step]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def numel(self) -> int:
        return self.worker.numel

    @property
    def steps(self) -> list[Step]:
        return [step for turn in self.turns for step in turn]

    def turn_s(self, what: str) -> list[float]:
        """Return the mean seconds a step of each turn."""
        return [statistics.fmean(getattr(step, what) for step in turn) for turn in self.turns]

    def ratios(self, other: Runner, what: str = "whole_s") -> list[float]:
        """Return the time against another contestant's, turn by turn."""
        pairs = zip(self.turn_s(what), other.turn_s(what), strict=True)
        return [mine / others for mine, others in pairs]


@dataclass
class Sitting:
    """A sitting: all that was measured in it, contestant by contestant."""

    what: str
    runners: list[Runner]
    absent: dict[str, str]  # who could not take part -> why
    fio_bytes_per_s: list[float] = field(default_factory=list)

    def find(self, name: str) -> Runner | None:
        return next((runner for runner in self.runners if runner.name == name), None)


def sit(
    what: str, entries: Sequence[Entry], directory: Path, rounds: int, fio_bytes: int = 0
) -> Sitting:
    """Run all entries by turns, in an order that is drawn anew each round, so that no entry always
    follows the same one; with fio_bytes, fio once a round as well. A peer that cannot start is left
    out, with its last words; ours must start.
    """
    order = random.Random(rounds)
    sitting = Sitting(what, [], {})
    fio = Fio(directory, fio_bytes) if fio_bytes else None
    try:
        for entry in entries:
            _join(sitting, entry, directory)
        for _ in range(rounds):
            for runner in order.sample(sitting.runners, len(sitting.runners)):
                time.sleep(PAUSE_S)
                runner.turns.append(runner.worker.run(STEPS_A_TURN))
            if fio is not None:
                sitting.fio_bytes_per_s.append(mixed_rate(fio))
        for runner in sitting.runners:
            runner.facts = runner.worker.facts()
    finally:
        for runner in sitting.runners:
            runner.worker.close()
        if fio is not None:
            fio.close()
    return sitting


def _join(sitting: Sitting, entry: Entry, directory: Path) -> None:
    if entry.kind == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        sitting.absent[entry.name] = "not installed: `make peers`"
        return
    try:
        worker = Worker(entry, directory)
    except PeerFailed as failure:
        if entry.kind in OURS:
            raise
        sitting.absent[entry.name] = str(failure)
    else:
        sitting.runners.append(Runner(entry, worker))


def mixed_rate(fio: Fio) -> float:
    """Return bytes a second, half of them read and half written, over chunks of a few sizes."""
    memory = "mmaphuge" if fio.has_huge_pages else "malloc"
    runs = [fio.run("mixed", size * MI, memory) for size in FIO_CHUNKS_MI]
    return sum(run.nbytes for run in runs) / sum(run.seconds for run in runs)
