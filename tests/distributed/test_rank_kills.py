"""One rank of a training is killed at a random moment, in each stage: all others say so within the
time-out, with an error, and nothing is left on the disk.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import SEED, chosen, tally
from support.ranks.launch import outcomes
from support.ranks.stages import DDP, gpt, tokens
from torch import nn

import offload
from offload.planning import planner

KILLS = chosen(test=5, torture=100, quick=1)  # one after the other in each kind of training
TIME_OUT_S = 30  # of the group, see launch.py
AT_ONCE = 2


@dataclass(frozen=True)
class Kill:
    number: int
    kind: str
    ranks: int
    victim: int
    delay_s: float  # after the first step


def kills() -> list[Kill]:
    rng, found = random.Random(SEED), []
    for number in range(KILLS):
        ranks = rng.choice([2, 2, 3])
        victim, delay_s = rng.randrange(ranks), rng.uniform(0.0, 0.4)
        found.append(Kill(number, list(LOOPS)[number % len(LOOPS)], ranks, victim, delay_s))
    return found


def ddp(swap: Path) -> tuple[nn.Module, Any]:
    model = DDP(gpt())
    return model, offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))


def reduced(swap: Path) -> tuple[nn.Module, Any]:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, offload.wrap(optimizer, release_grads=True)


def prepared(swap: Path) -> tuple[nn.Module, Any]:
    model = gpt()
    return offload.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), device="cpu")


def on_disk(swap: Path) -> tuple[nn.Module, Any]:
    """Make a model most of whose optimizer state is on disk, so that a step waits for the drive."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, offload.wrap(optimizer, release_grads=True, host_memory="256KiB", nvme=swap)


def fully_sharded(swap: Path) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    model = gpt()
    for layer in [*model.blocks, model]:  # type: ignore[union-attr]
        fully_shard(layer)
    return model, offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))


LOOPS = {
    "stage 1": ddp,
    "stage 2": reduced,
    "stage 3": prepared,
    "stage 2, on disk": on_disk,
    "FSDP2": fully_sharded,
}


def train_for_ever(rank: int, kill: Kill, swap: Path) -> None:
    """Train until a rank is killed; raise the error that this rank sees then."""
    planner.CHUNK_NUMEL, planner.LEAST_CHUNK_NUMEL = 1024, 64  # type: ignore[misc]
    model, optimizer = LOOPS[kill.kind](swap)
    for turn in count():
        model(tokens(rank, turn)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn == 0 and rank == kill.victim:
            end = threading.Timer(kill.delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            end.daemon = True
            end.start()


def check(kill: Kill, folder: Path) -> None:
    swap = folder / f"{kill.number}"
    swap.mkdir()
    found = outcomes(kill.ranks, train_for_ever, kill, swap, deadline_s=2 * TIME_OUT_S + 60)
    victim = found.pop(kill.victim)
    assert victim.exit_code == -signal.SIGKILL and victim.ended_s is not None, (kill, victim)
    for one in found:
        assert one.exit_code == 1 and one.error and one.ended_s is not None, (kill, one)
        assert one.ended_s - victim.ended_s < TIME_OUT_S + 5, (kill, one)
        # torch's own, where DDP or FSDP2 has noticed it first
        last = one.error.strip().splitlines()[-1]
        assert "StateError" in one.error or "RuntimeError" in one.error, (kill, last)
    assert os.listdir(swap) == [], kill


@pytest.mark.quick
@pytest.mark.timeout(300 + 20 * KILLS)
def test_one_rank_is_killed_and_all_others_say_so(tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(check, kill, tmp_path) for kill in kills()]:
            done.result()
    tally("rank kills", KILLS)
