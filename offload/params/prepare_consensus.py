"""The consensus of ranks that prepare a model together, before anything changes.

All that later decides about a collective must be the same on all ranks: the units, the least of all
budgets, the room for gathered blocks. The ranks must begin with equal parameters. If one rank
raises, all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload import kernels
from offload.core.errors import StateError
from offload.distributed import (
    Ranks,
    by_consensus,
    check_alike,
    each_by_consensus,
    ranks_of,
    told_checksum,
)
from offload.optim.agreement import START_ALIKE, VALUES
from offload.params.prepare_plan import PreparePlan


@contextmanager
def connected_ranks(process_group: object) -> Iterator[Ranks | None]:
    """Keep the ranks of a group connected while the block runs, and afterwards unless it raises."""
    ranks = ranks_of(process_group)
    try:
        yield ranks
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def plan_by_consensus(
    ranks: Ranks | None, host_bytes: int | None, make: Callable[[int | None], PreparePlan]
) -> PreparePlan:
    """Make the plan for the least budget of host memory that any rank has, check that it is the
    same on all ranks, and give the gathered blocks the room that all ranks have left.
    """
    if ranks is None:
        return make(host_bytes)
    allowed = [
        n for n in ranks.exchange(host_bytes, "host memory that is allowed") if n is not None
    ]
    prepare_plan = by_consensus(ranks, "prepare", lambda: make(min(allowed, default=None)))
    try:
        _check_same(ranks, prepare_plan)
        left = [
            max(0, n) for n in ranks.exchange(prepare_plan.left_bytes, "host memory that is left")
        ]
        prepare_plan.widen(min(left))
    except BaseException:
        prepare_plan.close()
        raise
    return prepare_plan


def _check_same(ranks: Ranks, prepare_plan: PreparePlan) -> None:
    structure = {"the model's structure": [_digest(prepare_plan), len(prepare_plan.units)]}
    check_alike(
        "prepare",
        ranks.exchange(structure, "the model's structure"),
        "every rank must prepare the same model, with the same optimizer groups and frozen "
        "parameters",
    )
    remedy = "give every rank the same, apart from the budgets"
    check_alike("config", ranks.exchange(_settings(prepare_plan), "config"), remedy)
    sums = each_by_consensus(
        ranks, "the first values", lambda: _sums(prepare_plan), others=StateError
    )
    check_alike("prepare", sums, START_ALIKE)


def _digest(prepare_plan: PreparePlan) -> str:
    lines = [
        f"{unit.number} {unit.needs} {m.name} {tuple(m.shape)} {m.dtype} {m.param.requires_grad}"
        for unit in prepare_plan.units
        for m in unit.members
    ]
    specs = prepare_plan.plan.facts.params
    lines += [f"{spec.name} {spec.numel} {spec.fields} {spec.unit}" for spec in specs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _settings(prepare_plan: PreparePlan) -> dict[str, object]:
    """Return the settings that must be equal on all ranks, so that all act alike."""
    config = prepare_plan.config
    return {
        "device": prepare_plan.device.type,
        "nvme": config.nvme is not None,
        "prefetch_depth": config.prefetch_depth,
        "activations": config.activations,
        "max_grad_norm": config.max_grad_norm,
        "self_check": config.self_check,
    }


def _sums(prepare_plan: PreparePlan) -> dict[str, str]:
    """Return checksums of the parameters' values by name, without those that the weights or their
    modules give.
    """
    members = [m for unit in prepare_plan.units for m in unit.members]
    start = prepare_plan.start
    return {
        f"{VALUES} {m.name}": told_checksum(kernels.checksum(m.param.detach().cpu()))
        for m in members
        if m.param.numel() and not m.param.is_meta and not (start and start.gives(m.param))
    }


@contextmanager
def same_random(ranks: Ranks | None) -> Iterator[None]:
    """Let all ranks draw the random numbers of rank 0 while the block runs.

    Afterwards each rank continues with its own state, as before; a rank whose state was that of
    rank 0 continues from rank 0's new state.
    """
    if ranks is None:
        yield
        return
    before = torch.get_rng_state()
    first = bytes.fromhex(ranks.exchange(before.numpy().tobytes().hex(), "random state")[0])
    state = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if not torch.equal(before, state):
            torch.set_rng_state(before)
