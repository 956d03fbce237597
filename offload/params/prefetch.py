"""What to fetch and what to evict, of blocks in one tier with a byte budget. Pure decisions.

What is needed soonest is fetched first, as far ahead as depth and bytes allow; what is needed
latest is evicted first. A block that is in use is never evicted, nor one that is needed before what
would take its place. When nothing can be evicted for a prefetch, there is none; only a block that
is needed now may push out what comes next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

HORIZON = 4  # uses that are looked at, for each block there is
MOST_DEPTH = 8


@dataclass(frozen=True)
class Moves:
    """First evict these, then fetch these, in order."""

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


@dataclass(frozen=True)
class TierState:
    """What a tier holds or is about to. held: blocks with memory in it. pinned: those of them that
    must stay.
    """

    sizes: Sequence[int]  # bytes of every block
    budget_bytes: int
    held: AbstractSet[int]
    pinned: AbstractSet[int] = frozenset()

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(self.sizes[block] for block in self.held)


def next_uses(ahead: Iterable[int], blocks: int) -> dict[int, int]:
    """How many uses ahead each block is needed, soonest first; what is not there is far away."""
    found: dict[int, int] = {}
    for distance, block in enumerate(islice(ahead, HORIZON * blocks + HORIZON)):
        found.setdefault(block, distance)
        if len(found) == blocks:
            break
    return found


def look_ahead(tier: TierState, uses: Mapping[int, int], depth: int) -> Moves:
    """What to do now so that the next `depth` blocks are there in time. uses: as `next_uses` has
    them.
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
            break  # a later one that is smaller would come at the cost of this one
        held -= set(chosen)
        free += sum(tier.sizes[b] for b in chosen) - tier.sizes[block]
        evict += chosen
        fetch.append(block)
        held.add(block)
    return Moves(tuple(evict), tuple(fetch))


def make_room(tier: TierState, uses: Mapping[int, int], nbytes: int) -> tuple[int, ...] | None:
    """What to evict so that `nbytes` are free for something that is needed now; None: even all that
    may go is not enough.
    """
    chosen = _farthest(tier.held - tier.pinned, uses, tier.sizes, nbytes - tier.free_bytes)
    return None if chosen is None else tuple(chosen)


def _farthest(
    blocks: Collection[int], uses: Mapping[int, int], sizes: Sequence[int], nbytes: int
) -> list[int] | None:
    """Those needed latest that have `nbytes` together. Among equals the larger, then the later."""
    chosen: list[int] = []
    for block in sorted(blocks, key=lambda b: (uses.get(b, math.inf), sizes[b], b), reverse=True):
        if nbytes <= 0:
            break
        chosen.append(block)
        nbytes -= sizes[block]
    return chosen if nbytes <= 0 else None


def derive_depth(fetch_s: Iterable[float], compute_s: Iterable[float]) -> int:
    """Blocks to fetch ahead so that a slow one still comes in time behind the compute of the others
    between; no deeper. fetch_s, compute_s: of each block, waiting left out.
    """
    fetches, computes = sorted(fetch_s), sorted(compute_s)
    if not fetches or not computes:
        return 2
    slowest = fetches[-1 - len(fetches) // 20]  # all but the odd straggler
    usual = computes[len(computes) // 2]
    if usual <= 0:
        return MOST_DEPTH
    return max(1, min(MOST_DEPTH, math.ceil(slowest / usual) + 1))
