"""Findings of an outside trial with several ranks; each failed before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.launch import run
from support.ranks.stages import DDP, gpt, tokens
from torch import nn

import offload
from offload.params import units
from offload.planning import planner


def caught(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(rank: int, turn: int, model: nn.Module, optimizer: Any) -> None:
    model(tokens(rank, turn)).backward()
    optimizer.step()
    optimizer.zero_grad()


def edit_on_one(rank: int, stage: int, turns: int) -> str:
    """Load other weights on rank 1 alone, after some steps."""
    model = gpt()
    outside = DDP(model) if stage == 1 else model
    optimizer = offload.wrap(adamw(model), release_grads=stage == 2)
    for turn in range(turns):
        step(rank, turn, outside, optimizer)
    if rank == 1:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
    return caught(lambda: step(rank, turns, outside, optimizer))


@pytest.mark.parametrize(("stage", "turns"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_parameters_that_were_changed_on_one_rank_are_told(stage: int, turns: int) -> None:
    for found in run(2, edit_on_one, stage, turns):
        assert found.startswith("StateError: step: rank 1 and rank 0 differ in the values of")


def add_without_room(rank: int, swap: Path) -> str:
    """Add parameters later of which only one rank has a part, and no room for its state."""
    planner.CHUNK_NUMEL, planner.LEAST_CHUNK_NUMEL = 1024, 64  # type: ignore[misc]
    units.LARGE_BYTES = 2048  # type: ignore[misc]
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    params = list(model.parameters())
    optimizer: Any = torch.optim.AdamW(params[:-2], lr=1e-2)
    offload.prepare(model, optimizer, device="cpu", host_memory="400KiB", nvme=swap)

    def more_than_reserved(records: Any, plan: Any) -> None:
        if rank == 1:
            raise offload.CapacityError("no room on rank 1")

    optimizer._offload_session.coordinator.check = more_than_reserved
    return caught(lambda: optimizer.add_param_group({"params": params[-2:]}))


def test_a_plan_that_one_rank_has_no_room_for_is_refused_on_all(tmp_path: Path) -> None:
    first, second = run(2, add_without_room, tmp_path, deadline_s=60)
    assert second == "CapacityError: no room on rank 1"
    assert "rank 1 failed, so no rank continues" in first and "no room on rank 1" in first


def part_ways(rank: int) -> str:
    model = gpt()
    optimizer: Any = offload.wrap(adamw(model), release_grads=True)
    step(rank, 0, model, optimizer)
    return caught(optimizer.state_dict if rank else lambda: step(rank, 1, model, optimizer))


def test_ranks_that_part_ways_are_not_told_of_a_rank_that_has_gone() -> None:
    for found in run(2, part_ways):
        assert "ranks are out of step" in found
        assert "has ended" not in found and "start all of them again" not in found


def differ_in_config(rank: int) -> tuple[str, str]:
    model = gpt()
    limit = {"max_grad_norm": 1.0 + rank}
    wrapped = caught(lambda: offload.wrap(adamw(model), release_grads=True, **limit))
    prepared = caught(lambda: offload.prepare(model, adamw(model), device="cpu", **limit))
    return wrapped, prepared


def test_a_setting_that_differs_is_named_with_its_values() -> None:
    for wrapped, prepared in run(2, differ_in_config):
        assert "differ in max_grad_norm (2.0 and 1.0); give all ranks the same" in wrapped, wrapped
        assert (
            "config: rank 1 and rank 0 differ in max_grad_norm (2.0 and 1.0); give" in prepared
        ), prepared


def other_groups(rank: int) -> tuple[str, str]:
    alone = dist.new_group([0])
    model = gpt()
    outside = caught(lambda: offload.wrap(adamw(model), process_group=alone)) if rank else ""
    ddp = caught(lambda: offload.prepare(DDP(model), adamw(model), device="cpu"))
    return outside, ddp


def test_groups_of_others_and_models_in_ddp_are_refused_with_a_remedy() -> None:
    (_, first), (outside, second) = run(2, other_groups)
    assert "this rank is not in it" in outside
    for found in (first, second):
        assert "is in DistributedDataParallel" in found and "process_group=False" in found


def one_rank_alone(rank: int) -> str:
    """Run the same program, started with one process."""
    model = gpt()
    optimizer: Any = offload.wrap(adamw(model), release_grads=True)
    with optimizer.no_sync():
        model(tokens(rank, 0)).backward()
    step(rank, 1, model, optimizer)
    return f"{os.environ['WORLD_SIZE']} rank"


def test_a_program_for_several_ranks_runs_with_one() -> None:
    assert run(1, one_rank_alone) == ["1 rank"]
