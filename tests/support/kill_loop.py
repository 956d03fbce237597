"""A loop that trains and saves and is killed, again and again:
`kill_loop.py FOLDER KILLS SEED [early | "one way"]`.

Everything is imported once. Each loop is forked from here, so it starts in milliseconds; this
process trains nothing and has no threads. A loop resumes from the newest checkpoint, tells by lines
on a pipe what it has loaded, what it is about to save and what it has saved, and is killed: at a
named point of a save, or at a moment that is drawn. The next loop must find the newest checkpoint
that was acknowledged, or a newer whole one, with the bits that every training has at that step.
Prints its counts as JSON; anything wrong is an exception.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # which the first optimizer imports, in seconds

import offload
from offload import api
from offload.checkpoint import writer
from offload.checkpoint.disk import POINTS, CheckpointDisk
from offload.checkpoint.format.directory import find_newest
from offload.checkpoint.format.verify import verify
from offload.core.errors import ConfigError
from offload.params import units
from offload.planning import planner
from offload.tools.selftest.kill_loop import Child, digest
from support.models import Gpt, batch, loss_of

IMPORTED = (api, torch._dynamo)  # before anything is forked

KEEP = 2
WAIT_S = 60.0
MOST_DELAY_S = 0.12  # of a random kill, from when the loop has loaded
REFERENCE_STEPS = 30


class Way(NamedTuple):
    kind: str  # wrap, prepare
    background: bool


WAYS = [Way(kind, background) for kind in ("wrap", "prepare") for background in (False, True)]


# --- the loop, in a process of its own ------------------------------------------------------------


class Killer(CheckpointDisk):
    """A disk that kills the process when it comes to `point` for the `count`-th time."""

    point, count = "", 0
    tell: Callable[..., None]

    def hook(self, point: str) -> None:
        if point == Killer.point:
            Killer.count -= 1
            if Killer.count == 0:
                Killer.tell("point", point)
                os.kill(os.getpid(), signal.SIGKILL)


def make_small() -> None:
    units.LARGE_BYTES = 2048  # type: ignore[misc]
    planner.LEAST_CHUNK_NUMEL = 64  # type: ignore[misc]
    planner.CHUNK_NUMEL = 1024  # type: ignore[misc]


def build(kind: str, swap: Path) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Gpt(layers=1, dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if kind == "wrap":
        optimizer = offload.wrap(optimizer, host_memory=30_000, nvme=swap)  # type: ignore[assignment]
    elif kind == "prepare":
        model, optimizer = offload.prepare(
            model, optimizer, device="cpu", host_memory=100_000, nvme=swap
        )
    return model, optimizer


def train(model: Any, optimizer: Any, step: int) -> None:
    loss_of(model, batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def run_loop(way: Way, folder: Path, early: bool, tell: Callable[..., None]) -> None:
    """Train and save until killed. early: a mutant, which acknowledges saves it has only begun."""
    make_small()
    writer.CheckpointDisk = Killer  # type: ignore[misc]
    Killer.tell = staticmethod(tell)
    model, optimizer = build(way.kind, folder / "swap")
    saves, step = folder / "saves", 0
    try:
        step = offload.load(saves, model, optimizer)["step"]
    except ConfigError:
        if any(not each.name.startswith(".") for each in saves.iterdir()):
            raise
    tell("loaded", step, digest(model, optimizer))
    while True:
        train(model, optimizer, step)
        step += 1
        tell("saving", step, digest(model, optimizer))
        done = offload.save(
            saves / f"{step}",
            model,
            optimizer,
            extra={"step": step},
            keep=KEEP,
            background=way.background,
        )
        if way.background:
            if early:
                tell("saved", step, "", 0)
            train(model, optimizer, step)
            step += 1
            train(model, optimizer, step)
            step += 1
            done.wait(WAIT_S)
            step_saved = step - 2
        else:
            step_saved = step
        names = os.listdir(saves)
        hidden = [name for name in names if name.startswith(".")]
        tell("saved", step_saved, ",".join(hidden), len(names) - len(hidden))


def run_reference(tell: Callable[..., None]) -> None:
    """Train with plain torch, in memory, never killed."""
    model, optimizer = build("plain", Path())
    for step in range(REFERENCE_STEPS):
        tell("saving", step, digest(model, optimizer))
        train(model, optimizer, step)


# --- the parent -----------------------------------------------------------------------------------


@dataclass
class Seen:
    kills: int = 0
    at_points: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    in_a_save: int = 0  # killed after it had begun and before it was acknowledged
    newer: int = 0  # found a whole checkpoint that was not acknowledged yet


class Contest:
    """A series of kills of one way, in one folder."""

    def __init__(self, way: Way, folder: Path, digests: dict[int, str], early: bool) -> None:
        self.way, self.folder, self.early = way, folder, early
        self.saves = folder / "saves"
        for each in (self.saves, folder / "swap"):
            each.mkdir(parents=True)
        self.digests = digests  # of every step that any training has reached
        self.newest = 0  # acknowledged
        self.saving = 0
        self.seen = Seen()

    def kill(self, point: str, count: int, delay_s: float) -> None:
        """Run one loop and kill it: at `point` for the `count`-th time, or after `delay_s`."""
        Killer.point, Killer.count = point, count
        child = Child(lambda tell: run_loop(self.way, self.folder, self.early, tell))
        begun_at = self.newest
        for line in child.said:
            self.hear(line)
            if line.startswith("loaded") and not point:
                time.sleep(delay_s)
                child.kill()
        code = child.end()
        assert code == signal.SIGKILL, f"{self.way}: the loop ended by itself: {code}"
        self.seen.kills += 1
        self.seen.in_a_save += self.saving > self.newest
        assert self.newest >= begun_at
        self._look()

    def hear(self, line: str) -> None:
        what, *words = line.rstrip("\n").split("\t")
        if what == "point":
            self.seen.at_points[words[0]] = self.seen.at_points.get(words[0], 0) + 1
            return
        step = int(words[0])
        if what == "saved":
            assert not words[1], f"{self.way}: {words[1]} is left after the save of {step}"
            assert int(words[2]) <= KEEP, f"{self.way}: {words[2]} checkpoints are kept"
            self.newest = step
            self.seen.saves += 1
            return
        if what == "loaded":
            assert step >= self.newest, f"{self.way}: {step} loaded, {self.newest} was saved"
        else:
            self.saving = step
        known = self.digests.setdefault(step, words[1])
        assert known == words[1], f"{self.way}: other bits at step {step} ({what})"

    def _look(self) -> None:
        """Check what a kill has left."""
        assert not os.listdir(self.folder / "swap"), f"{self.way}: swap files are left"
        try:
            path = find_newest(self.saves)
        except ConfigError:
            assert self.newest == 0, f"{self.way}: {self.newest} is lost"
            return
        step = int(path.name)
        assert step >= self.newest, f"{self.way}: newest is {step}, {self.newest} was acknowledged"
        self.seen.newer += step > self.newest
        for each in self.saves.iterdir():
            if not each.name.startswith("."):
                findings = verify(each)
                assert findings.is_whole, f"{self.way}: {each.name}: {findings.damage}"


def plan_kills(kills: int, rng: random.Random) -> list[tuple[str, int, float]]:
    """Draw the kills: each named point once, and then moments."""
    found = [(point, rng.randint(1, 2), 0.0) for point in POINTS]
    found += [("", 0, rng.uniform(0.0, MOST_DELAY_S)) for _ in range(kills - len(found))]
    rng.shuffle(found)
    return found


def main(folder: Path, kills: int, seed: int, early: bool, ways: list[Way]) -> None:
    assert torch.get_num_threads() == 1, "threads would not survive a fork: OMP_NUM_THREADS=1"
    rng = random.Random(seed)
    digests: dict[int, str] = {}
    reference = Contest(Way("plain", False), folder / "plain", digests, False)
    child = Child(run_reference)
    for line in child.said:
        reference.hear(line)
    child.end()
    assert len(digests) == REFERENCE_STEPS
    totals = Seen()
    for number, way in enumerate(ways):
        contest = Contest(way, folder / f"{number}", digests, early)
        for point, count, delay_s in plan_kills(-(-kills // len(ways)), rng):
            contest.kill(point, count, delay_s)
        seen = contest.seen
        assert set(seen.at_points) == set(POINTS), f"never at {set(POINTS) - set(seen.at_points)}"
        for point, times in seen.at_points.items():
            totals.at_points[point] = totals.at_points.get(point, 0) + times
        for name in ("kills", "saves", "in_a_save", "newer"):
            setattr(totals, name, getattr(totals, name) + getattr(seen, name))
    print(json.dumps(vars(totals)))


if __name__ == "__main__":
    how = sys.argv[4:]
    early = "early" in how
    ways = [way for way in WAYS if way.background] if early else WAYS
    ways = ways[-1:] if "one way" in how else ways
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), early, ways)
