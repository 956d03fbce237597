"""Consensus among ranks before they act together, so that no rank is left waiting."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from offload.core.errors import ConfigError, OffloadError, kind_of
from offload.core.metrics import Metrics
from offload.distributed import Ranks
from offload.optim.exchange import NETWORK
from offload.optim.flat import flat
from offload.optim.recipe import Record
from offload.optim.sums import checksums

_VALUES = "the values of"


def by_consensus(
    ranks: Ranks,
    what: str,
    act: Callable[[], Any],
    metrics: Metrics | None = None,
    remedy: str = "",
    deadline_s: float | None = None,
) -> list[Any]:
    """Run `act` on every rank and return all results, by rank. A result is a value that JSON can
    express. If `act` raises on one rank, all ranks raise.

    what: the act's name in messages. metrics: get the time spent waiting for the other ranks.
    remedy: advice appended to the error where other ranks do something else meanwhile. Blocks.
    """
    error: Exception | None = None
    said: dict[str, Any] = {}
    try:
        said["value"] = act()
    except Exception as failed:
        error = failed
        said = {"kind": type(failed).__name__, "text": str(failed)}
    try:
        with metrics.span(NETWORK, what) if metrics is not None else nullcontext():
            each = ranks.exchange(said, what, deadline_s)
    except OffloadError as lost:
        if error is not None:
            raise error from lost
        if remedy:
            lost.args = (f"{lost}; {remedy}",)
        raise
    if error is not None:
        raise error
    for rank, one in enumerate(each):
        if "text" in one:
            raise kind_of(one["kind"])(
                f"{what}: rank {rank} failed, so no rank continues: {one['text']}"
            )
    return [one["value"] for one in each]


def differing(each: Sequence[Mapping[str, object]]) -> tuple[str, int] | None:
    """Find the first entry in which a rank differs from rank 0; return its name and the rank."""
    for rank, one in enumerate(each):
        for name in {**each[0], **one}:
            if one.get(name) != each[0].get(name):
                return name, rank
    return None


def check_alike(what: str, said: Sequence[Mapping[str, object]]) -> None:
    """Raise `ConfigError` if parameters are not the same on all ranks. said: the facts of each
    rank about its own, by rank.
    """
    found = differing(said)
    if found is not None:
        name, rank = found
        remedy = "give all ranks the same"
        if name.startswith(_VALUES):
            remedy = (
                "every rank must begin with the same: seed them alike, load the same weights, or "
                "broadcast rank 0's before (or wrap with process_group=False, if they have nothing "
                "to do with one another)"
            )
        raise ConfigError(f"{what}: rank {rank} and rank 0 differ in {name}; {remedy}")


def settings_sum(records: Sequence[Record]) -> int:
    """Compute a checksum of the learning rates and all other settings of parameter groups."""
    groups = {id(record.group): record.group for record in records}
    table = [
        sorted((key, repr(value)) for key, value in group.items() if "param" not in key)
        for group in groups.values()
    ]
    return zlib.crc32(repr(table).encode())


def start_facts(records: Sequence[Record]) -> dict[str, Any]:
    """Collect the facts that must be equal on all ranks that share these parameters, by name: the
    shape, dtype, strides and frozenness of each parameter, then the checksums of their values.
    """
    found: dict[str, Any] = {"the number of parameters": len(records)}
    for record in records:
        kind = [list(record.shape), str(record.dtype), list(record.stride), record.is_frozen]
        found[f"shape, type or requires_grad of {record.name}"] = kind
    sums = checksums([flat(record.param) for record in records])
    for record, one in zip(records, sums, strict=True):
        found[f"{_VALUES} {record.name}"] = one
    return found
