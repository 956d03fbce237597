"""How much of a device's memory blocks may have, while activations and gradients come and go.

The limit is for everything on the device. The memory that is not the blocks' is measured whenever
blocks move, and room is left for its growth until blocks move again: twice the largest growth that
it ever had within one use of that phase, and more when a run begins with more elements than any run
before, since activations grow with them. Until a phase has been seen once, blocks have the least
that works.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from offload.device.accelerator import DeviceGauge

_MARGIN = 2.0  # times the largest growth of the rest within one use
_LONGER_MARGIN = 1.25  # times that growth, in proportion to a longer batch
_KNOWN_SHARE = 0.5  # of the units must be seen in a run: then its phase is known


class DeviceBudget:
    """The budget for the blocks of one model.

    limit_bytes: for everything on the device.
    least_bytes: for blocks, while the growth of the rest is not known.
    reclaimable: returns the bytes that other models would evict to make room for this one.
    One thread at a time.
    """

    def __init__(
        self,
        gauge: DeviceGauge,
        limit_bytes: int,
        least_bytes: int,
        units: int,
        reclaimable: Callable[[], int] = lambda: 0,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._found_bytes = limit_bytes  # the part of it that the device turned out to have
        self.others_bytes = 0  # not the blocks', when blocks last began to move
        self.others_peak_bytes = 0  # at any time, as far as is known
        self._gauge = gauge
        self._reclaimable = reclaimable
        self._least_bytes = least_bytes
        self._units = units
        self._since = gauge.read()
        self._others_since = 0
        self._use: tuple[Hashable, int] | None = None  # phase and unit that run
        self._growth: dict[Hashable, int] = {}  # by phase
        self._seen: dict[Hashable, set[int]] = {}  # units, by phase
        self._known: set[Hashable] = set()  # phases
        self._depth = 0
        self._most_numel = 0  # elements that a run was given
        self._longer = 1.0  # the present run's elements over the most before it; at least 1

    def expect(self, numel: int) -> None:
        """Note that a forward pass of `numel` elements begins."""
        self._longer = max(1.0, numel / self._most_numel) if self._most_numel else 1.0
        self._most_numel = max(self._most_numel, numel)

    @contextmanager
    def moving(self, use: tuple[Hashable, int] | None = None) -> Iterator[None]:
        """Account for blocks that are moved inside: measure before and after. use: the phase and
        unit that run from here on; None: still the one before.
        """
        if self._depth == 0:
            self._look()
        if use is not None:
            self._use = use
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._since = self._gauge.read()
                self._others_since = self._gauge.others_bytes(self._since)

    def _look(self) -> None:
        reading = self._gauge.read()
        if self._use is not None:
            phase, unit = self._use
            growth = self._since.growth_until(reading)
            self._growth[phase] = max(self._growth.get(phase, 0), growth)
            self._seen.setdefault(phase, set()).add(unit)
            peak = self._others_since + growth
            self.others_peak_bytes = max(self.others_peak_bytes, peak)
        self.others_bytes = self._gauge.others_bytes(reading) - self._reclaimable()

    @property
    def blocks_bytes(self) -> int:
        """The bytes that blocks may have now; may be negative."""
        phase = self._use[0] if self._use else None
        left = self._found_bytes - self.others_bytes - self._room_bytes
        return left if phase in self._known else min(left, self._least_bytes)

    @property
    def _room_bytes(self) -> int:
        """The bytes that are left free for the growth of the rest."""
        growth = self._growth.get(self._use[0] if self._use else None, 0)
        wanted = int(max(_MARGIN, _LONGER_MARGIN * self._longer) * growth)
        if self._longer == 1.0:
            return wanted
        # A guess: blocks keep the least, if they had it without the guess.
        most = self.limit_bytes - self.others_bytes - self._least_bytes
        return max(int(_MARGIN * growth), min(wanted, most))

    def excess_bytes(self, nbytes: int) -> int:
        """Return how many reclaimable bytes must be released before blocks take `nbytes` more."""
        return self._gauge.read().now + nbytes + self._room_bytes - self.limit_bytes

    def lower(self, nbytes: int) -> bool:
        """Lower the blocks' limit: the device did not have `nbytes` more than are in use. Blocks
        get what is in use now, or the least. Return whether this is the first time.
        """
        is_first = self._found_bytes == self.limit_bytes
        reading = self._gauge.read()
        least = self._gauge.others_bytes(reading) + self._least_bytes
        self._found_bytes = min(self._found_bytes - nbytes, max(reading.now, least))
        return is_first

    def end_run(self) -> None:
        """End a run: the phases of which it has seen enough units are known from now on."""
        for phase, units in self._seen.items():
            if len(units) >= _KNOWN_SHARE * self._units:
                self._known.add(phase)
