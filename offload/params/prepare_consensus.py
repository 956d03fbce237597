"""The consensus of ranks that prepare a model together, before anything changes.

All that later decides about a collective must be the same on all ranks: the units, the least of all
budgets, the room for gathered blocks. The ranks must begin with equal parameters. If one rank
raises, all raise.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError, StateError
from offload.distributed import Ranks, ranks_of
from offload.params.prepare_plan import PreparePlan

T = TypeVar("T")


def by_consensus(ranks: Ranks | None, what: str, act: Callable[[], T]) -> T:
    """Return the result of `act`, which each rank runs by itself; an error on one rank is an error
    on all.
    """
    return act() if ranks is None else ranks.by_consensus(what, act)


def agreed(
    ranks: Ranks | None,
    what: str,
    look: Callable[[], T],
    tell: Callable[[T], Mapping[str, object]],
) -> T:
    """Return the result of `look`. An error on one rank is an error on all, and so is a difference
    between ranks in the facts that `tell` returns about it.
    """
    if ranks is None:
        return look()
    error: BaseException | None = None
    found: list[T] = []
    told: dict[str, object] = {}
    try:
        found.append(look())
        facts = tell(found[0])
        told = {"facts": {name: _crc(value) for name, value in facts.items()}}
    except Exception as raised:
        error = raised
        told = {"error": f"{type(raised).__name__}: {raised}"}
    each = ranks.exchange(told, what)
    if error is not None:
        raise error
    for rank, one in enumerate(each):
        if "error" in one:
            raise StateError(f"{what}: rank {rank} failed, so no rank continues: {one['error']}")
        other = [n for n, value in one["facts"].items() if value != each[0]["facts"][n]]
        if other:
            raise StateError(
                f"{what}: rank {rank} has other {other[0]} than rank 0; every rank must do the same"
            )
    return found[0]


def _crc(value: object) -> int:
    return zlib.crc32(repr(value).encode())


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
    ranks.check_equal(
        "the model's structure",
        [_digest(prepare_plan), len(prepare_plan.units)],
        "every rank must prepare the same model, with the same optimizer groups and frozen "
        "parameters",
    )
    ranks.check_equal(
        "config", _facts(prepare_plan), "give every rank the same, apart from the budgets"
    )
    names = [m.name for unit in prepare_plan.units for m in unit.members]
    params = [m.param for unit in prepare_plan.units for m in unit.members]
    sums = by_consensus(
        ranks, "the first values", lambda: [_sum(prepare_plan, param) for param in params]
    )
    each = ranks.exchange(sums, "checksums of the first values")
    other = [name for name, *got in zip(names, *each, strict=True) if len(set(got)) > 1]
    if other:
        raise ConfigError(
            f"{other[0]}: has other values on one rank than on another (one of {len(other)}); "
            "every rank must begin with the same: set the same seed, load the same weights, or "
            "broadcast them before prepare"
        )


def _digest(prepare_plan: PreparePlan) -> str:
    lines = [
        f"{unit.number} {unit.needs} {m.name} {tuple(m.shape)} {m.dtype} {m.param.requires_grad}"
        for unit in prepare_plan.units
        for m in unit.members
    ]
    lines += [f"{spec.name} {spec.numel} {spec.fields} {spec.unit}" for spec in prepare_plan.specs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _facts(prepare_plan: PreparePlan) -> dict[str, object]:
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


def _sum(prepare_plan: PreparePlan, param: Tensor) -> int | None:
    """Return the checksum of a parameter's values; None: it is empty, or its values come from the
    weights or its module.
    """
    is_given = prepare_plan.start is not None and prepare_plan.start.gives(param)
    if param.is_meta or not param.numel() or is_given:
        return None
    return kernels.checksum(param.detach().cpu())


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
