"""A training that saves on signals, for test_signals.py: `signal_loop.py FOLDER HOW`. Tells what it
does by lines on stdout.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kill_loop import digest, make_small
from preparelib import Gpt, batch, loss_of

import offload
from offload.checkpoint import writer
from offload.checkpoint.disk import Disk


class Slow(Disk):
    """Comes to no end within any limit of a test, but to one."""

    def hook(self, point: str) -> None:
        if point == "data written":
            tell("stuck")
            time.sleep(2.0)


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
        writer.Disk = Slow  # type: ignore[misc]
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
