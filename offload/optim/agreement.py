"""What ranks tell one another before they do something together, so that none is left waiting."""

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
    """What `act` has to say on each rank, by rank: something that JSON can express. Where it raises
    on one rank, all raise. metrics: are told how long it took the others. remedy: for ranks that do
    something else meanwhile.
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
                f"{what}: rank {rank} cannot go on, and so no rank does: {one['text']}"
            )
    return [one["value"] for one in each]


def differing(each: Sequence[Mapping[str, object]]) -> tuple[str, int] | None:
    """The first entry in which a rank differs from rank 0, and the rank."""
    for rank, one in enumerate(each):
        for name in {**each[0], **one}:
            if one.get(name) != each[0].get(name):
                return name, rank
    return None


def check_alike(what: str, said: Sequence[Mapping[str, object]]) -> None:
    """Refuse parameters that are not the same on all ranks: what each has said of its own."""
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
    """Of learning rates and all else that is set for groups of parameters."""
    groups = {id(record.group): record.group for record in records}
    table = [
        sorted((key, repr(value)) for key, value in group.items() if "param" not in key)
        for group in groups.values()
    ]
    return zlib.crc32(repr(table).encode())


def start_facts(records: Sequence[Record]) -> dict[str, Any]:
    """What all ranks must have alike to share these parameters: by name, the kind of each, then the
    values.
    """
    found: dict[str, Any] = {"the number of parameters": len(records)}
    for record in records:
        kind = [list(record.shape), str(record.dtype), list(record.stride), record.is_frozen]
        found[f"shape, type or requires_grad of {record.name}"] = kind
    sums = checksums([flat(record.param) for record in records])
    for record, one in zip(records, sums, strict=True):
        found[f"{_VALUES} {record.name}"] = one
    return found
