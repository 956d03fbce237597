"""What to fetch and what to evict, of the blocks in one tier with a byte budget, and how far ahead.

The block that is needed soonest is fetched first, as far ahead as prefetch depth and bytes allow;
the block that is needed latest is evicted first. A block in use is never evicted, nor is one that
is needed before the block that would take its place. If nothing can be evicted for a prefetch, the
prefetch is left out; only a block that is needed now may displace one that is needed next. These
are pure functions.

The trace predicts the next uses of blocks, and has the times of unit uses; the metrics have those
of parameter reads. The depth follows from both and is derived anew after every round over the
units, so that it adapts to a drive that slows down or a batch that gets longer. The time between
two uses, less the waits in it, is also recorded in the timeline as the unit's compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from offload.core.metrics import Metrics
from offload.core.timeline import COMPUTE, DISK_READS, Event, busy_s
from offload.params.trace import Phase, Trace, Use
from offload.planning.unit import Unit

HORIZON = 4  # length of the look-ahead, in uses per block of the model
MOST_DEPTH = 8
_WEIGHT = 0.5  # of the latest rate in the moving average


@dataclass(frozen=True)
class PrefetchMoves:
    """The blocks to evict, and then those to fetch, in order."""

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


@dataclass(frozen=True)
class TierState:
    """The blocks that a tier holds or is fetching.

    free_bytes: what others may still take of its budget; negative if it holds more. held: blocks
    that have memory in it. pinned: those of them that must not be evicted.
    """

    sizes: Sequence[int]  # bytes of every block
    free_bytes: int
    held: AbstractSet[int]
    pinned: AbstractSet[int] = frozenset()


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


class PrefetchDepth:
    """The prefetch depth of one model, in units, and the uses that its trace predicts.

    sizes: bytes of its blocks. name: prefix of the names under which reads of blocks are recorded.
    depth: a fixed depth; None: derived. units: one for each block. now_s: the clock.
    """

    def __init__(
        self,
        metrics: Metrics,
        trace: Trace,
        sizes: Sequence[int],
        name: str,
        depth: int | None = None,
        units: Sequence[Unit] = (),
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self.trace = trace
        self.read_bytes_per_s: float | None = None  # None: no read has been measured yet
        self._metrics = metrics
        self._sizes = [size for size in sizes if size]
        self._name = name
        self._now_s = now_s or time.perf_counter
        self._since_s = self._now_s()
        self._last_use_s: float | None = None
        self._waited_s = 0.0  # since the latest use
        self._is_derived = depth is None
        self._units = units
        self._blocks = len(sizes)
        self._running: tuple[str, float] | None = None  # name and begin of the compute that runs
        self._recorded = 0  # uses since the depth was derived
        self._uses: dict[int, int] | None = None  # None: to be predicted
        self.depth = self.derive() if depth is None else depth

    def note_use(self, phase: Phase, unit: int) -> None:
        """Note that a unit is used now, and derive the depth after each round over the units."""
        now_s = self._now_s()
        self.pause(now_s)
        self._uses = None
        last_s, self._last_use_s = self._last_use_s, now_s
        pace_s = None if last_s is None else max(0.0, now_s - last_s - self._waited_s)
        self._waited_s = 0.0
        self.trace.record(phase, unit, pace_s)
        name = self._units[unit].name if self._units else ""
        self._running = f"{phase.value} {unit}: {name}", now_s
        self._metrics.sample(now_s)
        self._recorded += 1
        if self._is_derived and self._recorded >= self._blocks:
            self._recorded, before = 0, self.depth
            self.depth = self.derive()
            self._metrics.count("prefetch_depth_changes", int(self.depth != before))

    def uses(self) -> dict[int, int]:
        """Return how many uses ahead each block is needed, soonest first."""
        if self._uses is None:
            self._uses = next_uses(self._needed(self.trace.ahead()), self._blocks)
        return self._uses

    def uses_before_update(self) -> dict[int, int]:
        """Return the next uses, in a backward pass only those before its end."""
        if self.trace.last is None or self.trace.last.phase is not Phase.BACKWARD:
            return self.uses()
        return next_uses(self._needed(self._left_in_backward()), self._blocks)

    def left_in_backward(self) -> set[int]:
        """Return the numbers of the blocks that the trace expects to be used before the present
        backward pass ends.
        """
        most = HORIZON * self._blocks + HORIZON
        return set(self._needed(islice(self._left_in_backward(), most)))

    def _left_in_backward(self) -> Iterator[Use]:
        return takewhile(lambda use: use.phase is Phase.BACKWARD, self.trace.ahead())

    def _needed(self, uses: Iterable[Use]) -> Iterator[int]:
        return chain.from_iterable(self._units[use.unit].needs for use in uses)

    def pause(self, now_s: float | None = None) -> None:
        """Record the end of the compute that runs, if any."""
        if self._running is not None:
            name, begin_s = self._running
            end_s = self._now_s() if now_s is None else now_s
            self._running = None
            self._metrics.event(Event(COMPUTE, name, begin_s, end_s))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the time of the block from the compute that runs."""
        running, begin_s = self._running, self._now_s()
        self.pause(begin_s)
        try:
            yield
        finally:
            end_s = self._now_s()
            self._waited_s += end_s - begin_s
            self._running = running and (running[0], end_s)

    def derive(self) -> int:
        """Return the prefetch depth for the rates measured so far; take in the reads since the last
        call.
        """
        events = [
            event
            for event in self._metrics.events_since(self._since_s)
            if event.row == DISK_READS and event.name.startswith(self._name)
        ]
        self._since_s = self._now_s()
        busy = busy_s(events)
        if busy:
            rate = sum(event.nbytes for event in events) / busy
            before = self.read_bytes_per_s or rate
            self.read_bytes_per_s = before + _WEIGHT * (rate - before)
        if not self.read_bytes_per_s:
            return derive_depth([], [])
        rate = self.read_bytes_per_s
        return derive_depth((size / rate for size in self._sizes), self.trace.paces_s())
