"""Loops that train, save and are killed: `python -m offload.tools.selftest.kill_loop FOLDER
quick|full SEED`.

The modules are imported once. Each loop is forked from this process, so that it starts at once; the
parent trains nothing and has no threads. A loop resumes from the newest checkpoint and reports by
lines on a pipe what it has loaded, what it is about to save and what it has saved. It is killed
with SIGKILL: by itself at a named point of a save, or by the parent after a random time. The next
loop must find the newest acknowledged checkpoint, or a newer whole one, with the bits of plain
training at that step. Prints the totals as JSON; the last line of stderr is the error.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # otherwise the first optimizer imports it, which takes seconds

from offload import api
from offload.checkpoint import writer
from offload.checkpoint.disk import POINTS, CheckpointDisk
from offload.checkpoint.format.directory import find_newest
from offload.checkpoint.format.verify import verify
from offload.core.errors import ConfigError
from offload.tools.selftest.bits import without_promise
from offload.tools.selftest.check import CheckFailed, Setting, require
from offload.tools.selftest.model import loss_of, make_batch, make_model, make_optimizer

IMPORTED = (torch._dynamo,)  # before the first fork

WAYS = ("wrap", "prepare")
KEEP = 2
_QUICK_POINTS = ("data written", "manifest synced", "renamed", "parent synced")
_WAIT_S = 60  # until a loop must have ended
_MOST_DELAY_S = 0.3  # of a kill at a random time, after the loop has loaded
_BUDGET_BYTES = 4 << 20


@dataclass(frozen=True)
class Kill:
    """A kill of one loop. point: the point of a save at which it happens; "": it happens after
    `delay_s`. count: how many arrivals at the point it takes.
    """

    point: str
    count: int
    delay_s: float


# --- the loop, in a child process -----------------------------------------------------------------


def _killer(kill: Kill) -> type[CheckpointDisk]:
    """Make a disk class that kills its own process at the point of a save that `kill` names."""
    left = [kill.count]

    class Killer(CheckpointDisk):
        def hook(self, point: str) -> None:
            left[0] -= point == kill.point
            if point == kill.point and left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killer


def run_loop(way: str, folder: Path, seed: int, kill: Kill, tell: Callable[..., None]) -> None:
    """Resume, then train and save after each step, until the process is killed."""
    writer.CheckpointDisk = _killer(kill)  # type: ignore[attr-defined]
    model = make_model(seed)
    optimizer = make_optimizer(model)
    if way == "wrap":
        api.wrap(optimizer, host_memory=_BUDGET_BYTES, nvme=folder / "swap")
    else:
        api.prepare(model, optimizer, device="cpu", host_memory=_BUDGET_BYTES, nvme=folder / "swap")
    saves, step = folder / "saves", 0
    if any(saves.glob("[!.]*")):
        step = api.load(saves, model, optimizer)
    tell("loaded", step, digest(model, optimizer))
    while True:
        train_step(model, optimizer, step)
        step += 1
        tell("saving", step, digest(model, optimizer))
        api.save(saves / f"{step}", model, optimizer, extra=step, keep=KEEP)
        tell("saved", step, "")


def train_step(model: Any, optimizer: Any, step: int) -> None:
    loss_of(model, make_batch(step, "cpu")).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def digest(model: Any, optimizer: Any) -> str:
    """Return a hash of everything that a checkpoint restores: values, optimizer state, random
    state.
    """
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            found.update(f"{number}/{key}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def run_plain(seed: int, steps: int, tell: Callable[..., None]) -> None:
    """Train in memory, without kills, for the reference digests. The update is torch's own where it
    has the bits of ours.
    """
    model = make_model(seed)
    optimizer: Any = make_optimizer(model)
    if without_promise() is not None:
        optimizer = api.wrap(optimizer)
    for step in range(steps):
        tell("saving", step, digest(model, optimizer))
        train_step(model, optimizer, step)


# --- the parent -----------------------------------------------------------------------------------


class Child:
    """A forked process that says lines to its parent: a word, a step, a digest. SIGALRM ends it if
    nothing else does.
    """

    def __init__(self, work: Callable[[Callable[..., None]], None]) -> None:
        ours, out = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(ours)
            _work(work, out)
        os.close(out)
        self.said = os.fdopen(ours)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end; return the signal that has ended it, or minus its exit code."""
        self.said.close()
        _, status = os.waitpid(self._pid, 0)
        return -os.waitstatus_to_exitcode(status)


def _work(work: Callable[[Callable[..., None]], None], out: int) -> NoReturn:
    def tell(*words: object) -> None:
        os.write(out, ("\t".join(map(str, words)) + "\n").encode())

    code = 1
    try:
        signal.alarm(_WAIT_S)
        work(tell)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class KillSeries:
    """A series of kills of one way, in one folder. digests: the digest of each step that a training
    has reached, shared by all ways.
    """

    def __init__(self, way: str, folder: Path, seed: int, digests: dict[int, str]) -> None:
        self.way, self.folder, self.seed, self.digests = way, folder, seed, digests
        self.newest = self.saving = 0  # acknowledged, begun
        self.kills = self.saves = self.in_a_save = 0

    def run(self, kill: Kill) -> None:
        self.saving = self.newest
        child = Child(lambda tell: run_loop(self.way, self.folder, self.seed, kill, tell))
        for line in child.said:
            self.hear(line)
            if line.startswith("loaded") and not kill.point:
                time.sleep(kill.delay_s)
                child.kill()
        ended = child.end()
        where = kill.point or f"{kill.delay_s:.3f} s"
        what = f"{self.way}, killed at {where}: end"
        require(ended == signal.SIGKILL, what, got=ended, expected=int(signal.SIGKILL))
        self.kills += 1
        self.in_a_save += self.saving > self.newest
        self._look(f"{self.way}, killed at {where}")

    def hear(self, line: str) -> None:
        word, number, found = line.rstrip("\n").split("\t")
        step = int(number)
        if word == "saved":
            self.newest = step
            self.saves += 1
            return
        if word == "loaded":
            what = f"{self.way}: the step that was loaded"
            require(step >= self.newest, what, got=step, expected=f"{self.newest} or later")
        else:
            self.saving = step
        known = self.digests.setdefault(step, found)
        what = f"{self.way}: bits {word} at step {step}"
        require(known == found, what, got=found[:8], expected=known[:8])

    def _look(self, what: str) -> None:
        """Check what a kill has left: no swap file, a newest checkpoint at least as new as the last
        acknowledged one, and whole checkpoints only.
        """
        left = os.listdir(self.folder / "swap")
        require(not left, f"{what}: swap files", got=left, expected="none")
        saves = self.folder / "saves"
        try:
            step = int(find_newest(saves).name)
        except ConfigError:
            step = 0
        expected = f"{self.newest} or later"
        require(step >= self.newest, f"{what}: newest save", got=step, expected=expected)
        for each in saves.glob("[!.]*"):
            found = verify(each)
            require(found.is_whole, f"{what}: {each.name}", got=found.damage, expected="whole")


def plan_kills(is_quick: bool, numbers: random.Random) -> dict[str, list[Kill]]:
    """Draw the kills of each way: points of a save, divided among the ways, and random times."""
    points = list(_QUICK_POINTS if is_quick else POINTS)
    numbers.shuffle(points)
    found: dict[str, list[Kill]] = {}
    for number, way in enumerate(WAYS):
        own = [Kill(point, numbers.randint(1, 2), 0.0) for point in points[number :: len(WAYS)]]
        moments = 1 if is_quick else 3
        own += [Kill("", 0, numbers.uniform(0.0, _MOST_DELAY_S)) for _ in range(moments)]
        numbers.shuffle(own)
        found[way] = own
    return found


def contest(folder: Path, setting: Setting) -> dict[str, int]:
    """Run all kills of all ways and return the totals. Raises `CheckFailed` for the first error."""
    numbers = random.Random(setting.seed)
    digests: dict[int, str] = {}
    plain = KillSeries("plain", folder, setting.seed, digests)
    child = Child(lambda tell: run_plain(setting.seed, 12 if setting.is_quick else 30, tell))
    for line in child.said:
        plain.hear(line)
    child.end()
    require(len(digests) > 1, "steps of a plain loop", got=len(digests), expected="some")
    totals = {"kills": 0, "saves": 0, "in_a_save": 0}
    for way, kills in plan_kills(setting.is_quick, numbers).items():
        for each in ("saves", "swap"):
            (folder / way / each).mkdir(parents=True, mode=0o700)
        one = KillSeries(way, folder / way, setting.seed, digests)
        for kill in kills:
            one.run(kill)
        for name in totals:
            totals[name] += getattr(one, name)
    return totals


def main(folder: str, how: str, seed: str) -> int:
    if torch.get_num_threads() != 1:
        print("threads would not survive a fork: set OMP_NUM_THREADS=1", file=sys.stderr)
        return 2
    setting = Setting("cpu", Path(folder), how == "quick", int(seed))
    try:
        print(json.dumps(contest(Path(folder), setting)))
    except CheckFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
