"""A training with Ctrl-C at moments that are drawn, or at given places, for test_interrupts.py:
`interrupt_loop.py FOLDER WRAP_OR_PREPARE SEED COUNT`. The last line says what was done. With
`locks` for the seed it comes at COUNT places or more at which Python enters or leaves a lock, with
`clock` at any time.

After each interrupt the training must be at a step that plain torch knows, bit by bit, or say that
it is broken, and then a load must mend it. Nothing may wait longer than a deadline: then all
stacks are printed, and the process ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

import offload
from offload.checkpoint.format.verify import verify
from offload.core.budget import HOST
from offload.core.errors import OffloadError
from offload.optim.saver import Saver
from offload.tools.selftest.kill_loop import digest
from support.interrupts import Alarm, Moments, Place, is_shared
from support.kill_loop import make_small
from support.leftovers import await_nothing_held
from support.models import Gpt, batch, loss_of

HANG_S = float(os.environ.get("OFFLOAD_HANG_S", "120"))
MOST_STEPS = 12
TORCH = os.path.dirname(torch.__file__)


def train(model: Any, optimizer: Any, step: int) -> None:
    loss_of(model, batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Gpt(layers=1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def truth() -> list[str]:
    """Return the digests of model and optimizer before each step in plain torch."""
    model, optimizer = plain()
    found = []
    for step in range(MOST_STEPS + 1):
        torch.manual_seed(0)
        found.append(digest(model, optimizer))
        train(model, optimizer, step)
    return found


class Wrong(Exception):
    """A violation of what must hold after an interrupt."""


class Late:
    """A patch that delays the thread of a save, so that the step beside it meets every chunk
    unsaved.
    """

    until_s = 0.0
    run = Saver.run

    @staticmethod
    def run_late(saver: Saver) -> None:
        while time.monotonic() < Late.until_s:
            time.sleep(0.001)
        Late.run(saver)


class Training:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.saves = folder / "saves"
        self.saves.mkdir(parents=True)
        (folder / "swap").mkdir()
        self.truth = truth()
        self.step = 0
        self.saved: dict[Path, int] = {}  # acknowledged, with their steps
        self.number = 0
        self.counts: Counter[str] = Counter()
        self.begin()
        self.base = self.held()

    def begin(self) -> None:
        """Begin with a step, before which there is no state to save, and a save."""
        self.model, self.optimizer = plain()
        self.step = 0
        self.open()
        self.train()
        self.save()

    def open(self) -> None:
        swap = self.folder / "swap"
        if self.kind == "wrap":
            offload.wrap(self.optimizer, host_memory=30_000, nvme=swap)
        else:
            offload.prepare(
                self.model, self.optimizer, device="cpu", host_memory=100_000, nvme=swap
            )

    # --- what is interrupted ----------------------------------------------------------------------

    def train(self) -> None:
        train(self.model, self.optimizer, self.step)
        self.step += 1

    def save(self) -> None:
        self.saved[self._save(background=False)] = self.step

    def _save(self, background: bool) -> Any:
        self.number += 1
        return offload.save(
            self.saves / f"{self.number}", self.model, self.optimizer, background=background
        )

    def save_beside(self) -> None:
        """Take a background save, and a step that overlaps it."""
        step, Late.until_s = self.step, time.monotonic() + 1.0
        ticket = self._save(background=True)
        self.train()
        Late.until_s = 0.0
        self.saved[ticket.wait()] = step

    def load(self) -> None:
        path = max(self.saved, key=lambda each: int(each.name))
        offload.load(path, self.model, self.optimizer)
        self.step = self.saved[path]

    def load_beside(self) -> None:
        """Begin a background save, and a load that waits for its end."""
        self._save(background=True)
        self.load()

    def close(self) -> None:
        offload.close(self.model if self.kind == "prepare" else self.optimizer)

    def close_beside(self) -> None:
        self._save(background=True)
        self.close()

    # --- what must hold afterwards ----------------------------------------------------------------

    def judge(self, name: str, where: str) -> None:
        Late.until_s = 0.0
        self.settle()
        self.optimizer.zero_grad()
        if name.startswith("close"):
            self.close()
            self.judge_closed()
        steps = {self.step, self.step + (name in ("train", "save_beside"))}
        if name.startswith("load"):
            steps.add(self.saved[max(self.saved, key=lambda each: int(each.name))])
        try:
            torch.manual_seed(0)
            found = digest(self.model, self.optimizer)
        except OffloadError as error:  # the training says that it is broken; a load mends it
            self.counts["mended by a load"] += 1
            self.counts[type(error).__name__] += 1
            self.mend()
            return
        known = [step for step in steps if self.truth[step] == found]
        if not known:
            raise Wrong(f"{name}, interrupted at {where}: other bits than at steps {steps}")
        self.step = known[0]

    def settle(self) -> None:
        """Check that each checkpoint is whole, and each acknowledged one there; drop old ones."""
        with contextlib.suppress(OffloadError):  # of a background save that was not waited for
            offload.checkpoint.saves.await_saves([self.model, self.optimizer])
        for path in self.saves.iterdir():
            if path.name.startswith("."):
                raise Wrong(f"{path} was left behind")
            if path not in self.saved:
                if not verify(path).is_whole:
                    raise Wrong(f"{path} is not whole")
                shutil.rmtree(path)
        for path in self.saved:
            if not path.exists():
                raise Wrong(f"{path} was acknowledged, and is not there")
        for path in sorted(self.saved, key=lambda each: int(each.name))[:-2]:
            shutil.rmtree(path)
            del self.saved[path]

    def mend(self) -> None:
        self.load()
        torch.manual_seed(0)
        if digest(self.model, self.optimizer) != self.truth[self.step]:
            raise Wrong(f"a load brings other bits than those of step {self.step}")

    def judge_closed(self) -> None:
        await_nothing_held(HOST)  # threads that have just ended may hold something
        self.open()

    def held(self) -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def rewind(self) -> None:
        """Return to the beginning before the steps that plain torch has taken run out."""
        if self.step < MOST_STEPS - 2:
            return
        self.close()
        await_nothing_held(HOST)
        if self.held()[1] > self.base[1]:
            raise Wrong(f"threads and files: {self.base} before, {self.held()} now")
        for path in self.saved:
            shutil.rmtree(path)
        self.saved.clear()
        self.begin()


ACTS = ("save_beside", "load_beside", "close_beside", "train", "save", "load", "close")


class Interrupter:
    def __init__(self, training: Training, random_: random.Random) -> None:
        self.training, self.random = training, random_
        self.known: dict[str, list[int]] = {}  # of each act: moments to choose from
        self.ignored = 0  # Ctrl-C in a finalizer is Python's to lose
        sys.unraisablehook = self.ignore

    def ignore(self, what: object) -> None:
        """Count an exception that Python ignores, and drop it: a reference would keep memory."""
        self.ignored += 1

    def interrupt(
        self, name: str, at: int | Place, only: Callable[[CodeType], bool] | None = None
    ) -> Moments:
        moments = Moments(at, only)
        self.interrupt_by(moments, name, f"moment {at}")
        return moments

    def interrupt_by(self, moments: Moments | Alarm, name: str, what: str) -> None:
        training = self.training
        act: Callable[[], None] = getattr(training, name)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        interrupted = False
        try:
            with moments:
                act()
        except KeyboardInterrupt:
            interrupted = True
        except OffloadError as error:
            # The error of a background save that the interrupt has ended.
            if moments.came_at is None:
                raise
            training.counts[f"told as {type(error).__name__}"] += 1
        was_ignored, self.ignored = bool(self.ignored), 0
        training.counts["interrupts"] += moments.came_at is not None
        training.counts["not raised"] += moments.came_at is not None and not interrupted
        training.counts["lost in a finalizer"] += was_ignored
        self.check_grad_mode(moments)
        try:
            training.judge(name, str(moments))
            training.rewind()
        except BaseException as error:
            error.add_note(f"after Ctrl-C in {name} at {moments}, {what}")
            raise
        faulthandler.cancel_dump_traceback_later()

    def check_grad_mode(self, moments: Moments | Alarm) -> None:
        """Check that gradients are on again, unless torch's own `no_grad` was interrupted.

        It is written in Python: Ctrl-C at the beginning of its exit leaves it in force, as it does
        without the engine.
        """
        if torch.is_grad_enabled():
            return
        torch.set_grad_enabled(True)
        assert moments.came_at is not None
        if not moments.came_at[0].co_filename.startswith(TORCH):
            raise Wrong(f"gradients are off after Ctrl-C at {moments}")
        self.training.counts["no_grad left by torch"] += 1

    def run_over_locks(self, count: int) -> None:
        """Interrupt at places in locks: at all in `threading`, at some of the others.

        The same place with another caller is another place.
        """
        found: dict[Place, str] = {}
        for name in ACTS:
            for place in self.interrupt(name, 0, is_shared).places:
                found.setdefault(place, name)
        first = [place for place in found if place[0].co_filename.endswith("threading.py")]
        rest = [place for place in found if place not in first]
        for place in first + rest[:: max(1, len(rest) // max(1, count - len(first)))]:
            self.interrupt(found[place], place, is_shared)

    def run(self, count: int) -> None:
        for name in ACTS:
            self.learn(name, self.interrupt(name, 0))
        while self.training.counts["interrupts"] < count:
            name = self.random.choice(ACTS)
            self.learn(name, self.interrupt(name, self.random.choice(self.known[name])))

    def run_by_clock(self, count: int) -> None:
        """Interrupt without a tracer: many more in the same time, and none can be repeated."""
        took_s = {}
        for name in ACTS:
            begin_s = time.monotonic()
            self.interrupt_by(Alarm(HANG_S / 2), name, "not at all")
            took_s[name] = time.monotonic() - begin_s
        while self.training.counts["interrupts"] < count:
            name = self.random.choice(ACTS)
            after_s = self.random.uniform(1e-5, took_s[name])
            self.interrupt_by(Alarm(after_s), name, f"after {after_s:.6f} s")

    def learn(self, name: str, moments: Moments) -> None:
        """Note moments to interrupt an act at: the first time of each place, so that rare places
        count as much as others, and as many moments at random.
        """
        if moments.came_at is None:
            places = list(moments.places.values())
            self.known[name] = places + [
                self.random.randint(1, max(1, moments.count)) for _ in places
            ]


def main(folder: Path, kind: str, seed: str, count: int) -> None:
    make_small()
    gc.freeze()  # every judgement collects garbage
    Saver.run = Late.run_late  # type: ignore[method-assign]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    training = Training(folder, kind)
    interrupter = Interrupter(training, random.Random(seed))
    if seed == "locks":
        interrupter.run_over_locks(count)
    elif seed == "clock":
        interrupter.run_by_clock(count)
    else:
        interrupter.run(count)
    training.close()
    await_nothing_held(HOST)
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    print(json.dumps({**training.counts, "threads left": left, "bytes left": HOST.used_bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
