"""What to fetch and what to evict, of the blocks in one tier with a byte budget: pure functions.

The block that is needed soonest is fetched first, as far ahead as prefetch depth and bytes allow;
the block that is needed latest is evicted first. A block in use is never evicted, nor is one that
is needed before the block that would take its place. If nothing can be evicted for a prefetch, the
prefetch is left out; only a block that is needed now may displace one that is needed next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

HORIZON = 4  # length of the look-ahead, in uses per block of the model
MOST_DEPTH = 8


@dataclass(frozen=True)
class PrefetchMoves:
    """The blocks to evict, and then those to fetch, in order."""

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


@dataclass(frozen=True)
class TierState:
    """The blocks that a tier holds or is fetching.

    held: blocks that have memory in it. pinned: those of them that must not be evicted.
    """

    sizes: Sequence[int]  # bytes of every block
    budget_bytes: int
    held: AbstractSet[int]
    pinned: AbstractSet[int] = frozenset()

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(self.sizes[block] for block in self.held)


def next_uses(ahead: Iterable[int], blocks: int) -> dict[int, int]:
    """Return how many uses ahead each block is needed, soonest first. A block that is not in the
    result is needed later than all others.
    """
    found: dict[int, int] = {}
    for distance, block in enumerate(islice(ahead, HORIZON * blocks + HORIZON)):
        found.setdefault(block, distance)
        if len(found) == blocks:
            break
    return found


def look_ahead(tier: TierState, uses: Mapping[int, int], depth: int) -> PrefetchMoves:
    """Choose what to evict and fetch now so that the next `depth` blocks are resident in time.
    uses: a result of `next_uses`.
    """
    held, free = set(tier.held), tier.free_bytes
    evict: list[int] = []
    fetch: list[int] = []
    for block in islice(uses, depth):
        if block in held:
            continue
        spare = [b for b in held - tier.pinned if uses.get(b, math.inf) > uses[block]]
        chosen = _farthest(spare, uses, tier.sizes, tier.sizes[block] - free)
        if chosen is None:
            break  # fetching a smaller, later block would take the room that this one needs
        held -= set(chosen)
        free += sum(tier.sizes[b] for b in chosen) - tier.sizes[block]
        evict += chosen
        fetch.append(block)
        held.add(block)
    return PrefetchMoves(tuple(evict), tuple(fetch))


def make_room(tier: TierState, uses: Mapping[int, int], nbytes: int) -> tuple[int, ...] | None:
    """Choose what to evict so that `nbytes` are free for a block that is needed now; None: evicting
    all that may be evicted is not enough.
    """
    chosen = _farthest(tier.held - tier.pinned, uses, tier.sizes, nbytes - tier.free_bytes)
    return None if chosen is None else tuple(chosen)


def _farthest(
    blocks: Collection[int], uses: Mapping[int, int], sizes: Sequence[int], nbytes: int
) -> list[int] | None:
    """Return the blocks needed latest that together have `nbytes`, or None. Among equals the larger
    first, then the later.
    """
    chosen: list[int] = []
    for block in sorted(blocks, key=lambda b: (uses.get(b, math.inf), sizes[b], b), reverse=True):
        if nbytes <= 0:
            break
        chosen.append(block)
        nbytes -= sizes[block]
    return chosen if nbytes <= 0 else None


def derive_depth(fetch_s: Iterable[float], compute_s: Iterable[float]) -> int:
    """Return the least prefetch depth at which a slow fetch is hidden behind the compute of the
    blocks before it, at most `MOST_DEPTH`; 2 if nothing is measured. fetch_s, compute_s: seconds of
    each block, without waits.
    """
    fetches, computes = sorted(fetch_s), sorted(compute_s)
    if not fetches or not computes:
        return 2
    slowest = fetches[-1 - len(fetches) // 20]  # without the slowest 5%, the outliers
    usual = computes[len(computes) // 2]
    if usual <= 0:
        return MOST_DEPTH
    return max(1, min(MOST_DEPTH, math.ceil(slowest / usual) + 1))
