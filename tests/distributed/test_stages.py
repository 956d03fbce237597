"""`wrap` among ranks: stage 1 in DDP, stage 2 without it, beside DDP with plain torch.

Two ranks: the same bits as DDP, because the mean of two does not depend on the order. Four: gloo's
all-reduce adds in an order of its own, so a bound for DDP, and the same bits for both stages.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_tensors
from support.loops import chosen
from support.ranks.launch import run
from support.ranks.stages import Loop, Wide, experts, furthest, gpt, lora
from support.storage_faults import FaultySystem

import offload
from offload.core.errors import StoreError
from offload.distributed.ranks import ranks_of
from offload.optim import buckets
from offload.storage import handout

pytestmark = pytest.mark.ranks
STEPS = chosen(test=5, torture=20)
BOUND = 3e-5  # of parameters, where means are taken, or norms, in another order
SMALL = 16 << 10  # of buckets, so that there are several, and parameters that are larger


def compare(plain: Loop, ours: Loop, steps: int = STEPS) -> None:
    """Check that every loss and every parameter is the same after every step."""
    for _ in range(steps):
        assert same_tensors(plain.step(), ours.step())
        assert same_tensors(plain.params, ours.params)


def equal_to_ddp(rank: int, stage: int, directory: str) -> None:
    buckets.BUCKET_BYTES = SMALL
    for make in (gpt, lora, experts):
        compare(Loop(0, make), ours := Loop(stage, make))
        check_bytes(ours, make)
        same_state(ours)
        ours.optimizer.close()
    compare(Loop(0, experts, micro=3), ours := Loop(stage, experts, micro=3), STEPS // 2)
    ours.optimizer.close()
    on_disk = {"nvme": directory, "host_memory": (600 if stage == 1 else 900) << 10}
    compare(Loop(0, Wide), ours := Loop(stage, Wide, settings=on_disk))
    assert offload.report(ours.optimizer).disk_written_bytes > 0
    check_bytes(ours, Wide)
    same_state(ours)
    ours.optimizer.close()


def check_bytes(ours: Loop, make: Any) -> None:
    """State and bytes on the network against the formulas of the ZeRO paper."""
    count, session = dist.get_world_size(), ours.optimizer._offload_session
    numel = sum(param.numel() for param in ours.trained)
    held = 4 * sum(spec.own_numel * len(spec.fields) for spec in session.plan.params)
    assert abs(held - 8 * numel / count) <= 0.02 * 8 * numel / count + 8 * 16, (make, held)
    told = offload.report(ours.optimizer).to_dict()
    theory = 4 * numel * (count - 1) / count * STEPS
    kinds = ("gather", "reduce") if ours.stage == 2 else ("gather",)
    for kind in kinds:
        sent = told[f"ranks/sent_bytes/{kind}"]
        assert sent <= 1.05 * theory, (make, kind, sent / theory)
        assert sent >= theory or make is experts, (make, kind, sent / theory)  # some are unused


def same_state(ours: Loop) -> None:
    """Check that all ranks get the same whole state."""
    state = ours.optimizer.state_dict()["state"]
    sums = [float(v.double().sum()) for each in state.values() for v in each.values()]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sums)
    assert found.count(sums) == len(found)


def few_steps(rank: int) -> None:
    buckets.BUCKET_BYTES = SMALL
    for stage in (1, 2):
        compare(Loop(0), ours := Loop(stage), steps=2)
        ours.optimizer.close()


@pytest.mark.quick
def test_the_first_steps_have_the_bits_of_ddp() -> None:
    run(2, few_steps)


@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_have_the_bits_of_ddp(stage: int, tmp_path: Path) -> None:
    run(2, equal_to_ddp, stage, str(tmp_path), deadline_s=120)


def refused_on_one(rank: int, stage: int, directory: str) -> None:
    """Check that a rank that cannot write what it receives raises its own error, and that the other
    ranks do not wait for it.
    """
    buckets.BUCKET_BYTES = SMALL
    on_disk = {"nvme": directory, "host_memory": (600 if stage == 1 else 900) << 10}
    ours = Loop(stage, Wide, settings=on_disk)
    ours.step()
    real = handout.System
    faults = [FaultySystem("write", errno.ENOSPC, 2), FaultySystem("sync", errno.EIO, 1)]
    for fault in faults if rank == 0 else (None, None):
        handout.System = (lambda fault=fault: fault) if fault else real  # type: ignore[misc]
        if fault is None:
            ours.optimizer.state_dict()
        else:
            with pytest.raises(StoreError) as caught:
                ours.optimizer.state_dict()
            assert caught.value.errno == fault.code
    handout.System = real  # type: ignore[misc]
    same_state(ours)
    ours.step()
    ours.optimizer.close()
    equal_on_all(ours.params)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_cannot_write_the_state_lets_nobody_wait(stage: int, tmp_path: Path) -> None:
    run(2, refused_on_one, stage, str(tmp_path), deadline_s=100)


def clipped(rank: int, stage: int) -> None:
    """Clip with torch's function where gradients can be seen (stage 1), and within the update."""
    buckets.BUCKET_BYTES = SMALL
    if stage == 1:
        compare(Loop(0, gpt, clip=0.3), ours := Loop(1, gpt, clip=0.3))
        ours.optimizer.close()
    plain, ours = Loop(0, gpt, clip=0.3), Loop(stage, gpt, settings={"max_grad_norm": 0.3})
    for _ in range(STEPS):
        plain.step()
        ours.step()
        assert 0.3 < ours.optimizer.grad_norm < 30
    assert (far := furthest(plain.params, ours.params)) < BOUND, far
    equal_on_all(ours.params, ours.optimizer.grad_norm)


def equal_on_all(params: list[torch.Tensor], *also: Any) -> None:
    mine = [[float(p.double().sum()) for p in params], *also]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    assert found.count(mine) == len(found), found


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping(stage: int) -> None:
    run(2, clipped, stage)


def four(rank: int) -> None:
    buckets.BUCKET_BYTES = SMALL
    ranks = ranks_of(None)
    clip = {"max_grad_norm": 0.3}
    for make, micro, settings in ((gpt, 2, clip), (experts, 1, {})):
        plain = Loop(0, make, micro=micro, clip=settings.get("max_grad_norm"))
        ours = Loop(2, make, micro=micro, settings=settings)
        other = Loop(1, make, micro=micro, settings=settings, reduced_by=ranks)
        for _ in range(STEPS // 2):
            plain.step()
            assert same_tensors(ours.step(), other.step())
            assert same_tensors(ours.params, other.params)
        assert (far := furthest(plain.params, ours.params)) < BOUND, far
        equal_on_all(ours.params)
        ours.optimizer.close()
        other.optimizer.close()


def test_four_ranks() -> None:
    run(4, four, deadline_s=120)
