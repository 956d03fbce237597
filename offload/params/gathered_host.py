"""Sharded blocks that are computed with on devices, gathered in host memory for a moment.

Modules that initialise their parameters when training starts need them there: they draw the CPU's
random numbers, as they do on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import StateError
from offload.distributed import Ranks
from offload.params.block import Block
from offload.params.external_edits import take_in_rebound, untangle
from offload.params.placeholder import restore


@contextmanager
def whole_in_host(
    blocks: Sequence[Block],
    ranks: Ranks,
    shard_of: Callable[[Block], Tensor],
    hide: Callable[[Block], None],
) -> Iterator[None]:
    """Keep the parameters of `blocks` gathered in host memory, outside of the budget, while the
    block runs.

    What the caller does to them must be the same on all ranks (`StateError` if it is not); each
    rank then copies its shard of the result. shard_of: a block's shard, which no other code reads
    meanwhile. hide: makes the parameters of a block placeholders again.
    """
    gather_memory = [_gather(block, ranks, shard_of(block)) for block in blocks]
    places = list(zip(blocks, gather_memory, strict=True))
    try:
        for block, whole in places:
            for member, values in block.views(whole):
                restore(member.param, values)
        yield
        untangle(places)
        for block, whole in places:
            take_in_rebound(block, whole)
        _check_same(places, ranks)
        for block, whole in places:
            begin, end = block.span
            shard_of(block)[: end - begin].copy_(whole[begin:end])
    finally:
        for block in blocks:
            hide(block)


def _gather(block: Block, ranks: Ranks, own: Tensor) -> Tensor:
    whole = torch.empty(block.whole_bytes, dtype=torch.uint8, device="cpu")
    if block.whole_bytes:
        ranks.gather(whole, own, f"parameters of {block.name}").wait()
    return whole


def _check_same(places: Sequence[tuple[Block, Tensor]], ranks: Ranks) -> None:
    sums = [kernels.checksum(whole[: b.unit.nbytes]) if b.unit.nbytes else 0 for b, whole in places]
    each = ranks.exchange(sums, "parameters that were filled")
    for (block, _), *found in zip(places, *each, strict=True):
        if len(set(found)) > 1:
            raise StateError(
                f"{block.name}: its modules gave it other values on one rank than on another; "
                "every rank must fill parameters alike"
            )
