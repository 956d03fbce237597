"""A training that saves on signals, for test_signals.py: `signal_loop.py FOLDER HOW`. Reports its
progress by lines on stdout.

With `many SEED COUNT` for HOW it forks so many trainings, one after the other, and ends each by
SIGTERM at a moment that is drawn; what is wrong is an exception.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import offload
from offload.checkpoint import writer
from offload.checkpoint.disk import CheckpointDisk
from offload.checkpoint.format.directory import find_newest
from offload.checkpoint.format.verify import verify
from offload.tools.selftest.kill_loop import digest
from support.kill_loop import make_small
from support.models import Gpt, batch, loss_of


class Slow(CheckpointDisk):
    """A disk whose saves do not end within any limit of a test."""

    def hook(self, point: str) -> None:
        if point == "data written":
            tell("stuck")
            time.sleep(60.0)


def tell(*words: Any) -> None:
    os.write(1, ("\t".join(map(str, words)) + "\n").encode())


def main(folder: Path, how: str) -> None:
    make_small()
    torch.manual_seed(3)
    model: Any = Gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = offload.wrap(optimizer, host_memory=30_000, nvme=folder / "swap")  # type: ignore[assignment]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = 0
    stateful = {"scheduler": scheduler} if how in ("point", "forgotten") else {}
    limit_s = 1.0 if how in ("slow", "idle", "slow background") else 10.0
    if how.startswith("slow"):
        writer.CheckpointDisk = Slow  # type: ignore[misc]
    with offload.save_on_signal(
        folder / "saves" / "at",
        model,
        optimizer,
        limit_s=limit_s,
        extra=lambda: {"step": step + (how != "point")},
        keep=2,
        **stateful,
    ) as saver:
        tell("ready", os.getpid())
        if how == "idle":
            time.sleep(60)
        while step < 2000:
            loss_of(model, batch(step)).backward()
            # Before the step ends, as the save at its end does.
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            tell("step", step, digest(model, optimizer) if how != "slow" else "")
            if how == "point":
                saver.point()
            if how == "slow background" and step == 3:
                offload.save(folder / "saves" / "own", model, optimizer, background=True)
            if how == "background" and step % 3 == 0:
                offload.save(
                    folder / "saves" / f"own-{step}", model, optimizer, keep=2, background=True
                )


# --- many -----------------------------------------------------------------------------------------

LIMIT_S = 10.0


def train_and_save(folder: Path, number: int, tell_parent: int) -> None:
    """Resume, train, and save every second step, until SIGTERM.

    Trainings of odd numbers save in the background.
    """
    make_small()
    torch.manual_seed(3)
    model: Any = Gpt(layers=1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    offload.wrap(optimizer, host_memory=30_000, nvme=folder / "swap")
    saves, step = folder / "saves", 0
    if any(saves.iterdir()):
        step = offload.load(saves, model, optimizer)["step"]
    with offload.save_on_signal(
        saves / f"signal-{number}",
        model,
        optimizer,
        limit_s=LIMIT_S,
        extra=lambda: {"step": step + 1},
        keep=2,
    ):
        os.write(tell_parent, b"!")
        while True:
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 2:
                path, extra = saves / f"{number}-{step}", {"step": step}
                background = bool(number % 2)
                offload.save(path, model, optimizer, extra=extra, keep=2, background=background)


def fork(folder: Path, number: int) -> tuple[int, int]:
    """Fork a training; return its process id and the pipe on which it says that it trains."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    code = 1
    try:
        train_and_save(folder, number, into)
    except SystemExit as end:
        code = int(str(end.code))
        for thread in threading.enumerate():  # as a process that ends does
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_many(folder: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for name in ("swap", "saves"):
        (folder / name).mkdir(parents=True)
    saved = 0
    for number in range(count):
        pid, out = fork(folder, number)
        assert os.read(out, 1) == b"!", "it ended before it trained"
        time.sleep(rng.uniform(0.0, 0.25))
        begin = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert time.monotonic() - begin < LIMIT_S + 1
        assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM, number
        os.close(out)
        names = os.listdir(folder / "saves")
        assert not [name for name in names if name.startswith(".")], names
        assert not os.listdir(folder / "swap")
        assert all(verify(folder / "saves" / name).is_whole for name in names)
        assert find_newest(folder / "saves").name == f"signal-{number}"
        saved += 1
    tell("ended", saved)


if __name__ == "__main__":
    if sys.argv[2] == "many":
        end_many(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
