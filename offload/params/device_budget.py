"""How much of a device's memory blocks may have, while activations and gradients come and go.

The limit is for everything on the device. What others hold is read whenever blocks move, and room
is left for what they may come to hold until blocks move again: by how much they ever grew within
one use of that phase, and as much again; more where a run begins with more elements than any run
before, for activations grow with them. Until a phase has been gone through once, blocks have the
least that works.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from offload.device import DeviceGauge

_MARGIN = 2.0  # times the largest growth of others within one use
_LONGER_MARGIN = 1.25  # times that growth, in proportion to a longer batch
_KNOWN_SHARE = 0.5  # of the units were seen in a run: then enough is known of its phase


class DeviceBudget:
    """For the blocks of one model. limit_bytes: for everything on the device. least_bytes: for
    blocks, while nothing is known of the others. reclaimable: bytes of others that would go for us.
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
        self._found_bytes = limit_bytes  # of it, what the device turned out to have
        self.others_bytes = 0  # when blocks last began to move
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
        self._longer = 1.0  # times as many as ever before has the run under way

    def expect(self, numel: int) -> None:
        """A run begins, with so many elements."""
        self._longer = max(1.0, numel / self._most_numel) if self._most_numel else 1.0
        self._most_numel = max(self._most_numel, numel)

    @contextmanager
    def moving(self, use: tuple[Hashable, int] | None = None) -> Iterator[None]:
        """Blocks come and go inside. use: the phase and unit that run from here on; None: it is
        still the one before.
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
        """What blocks may have now; may be negative."""
        phase = self._use[0] if self._use else None
        left = self._found_bytes - self.others_bytes - self._room_bytes
        return left if phase in self._known else min(left, self._least_bytes)

    @property
    def _room_bytes(self) -> int:
        """That is left free for the growth of others."""
        growth = self._growth.get(self._use[0] if self._use else None, 0)
        wanted = int(max(_MARGIN, _LONGER_MARGIN * self._longer) * growth)
        if self._longer == 1.0:
            return wanted
        # A guess: blocks keep the least, if they had it without the guess.
        most = self.limit_bytes - self.others_bytes - self._least_bytes
        return max(int(_MARGIN * growth), min(wanted, most))

    def excess_bytes(self, nbytes: int) -> int:
        """How much of what can be reclaimed must go before we take so many bytes more."""
        return self._gauge.read().now + nbytes + self._room_bytes - self.limit_bytes

    def lower(self, nbytes: int) -> bool:
        """The device did not have so many bytes more than are in use: blocks are to be content with
        that, or with the least. Whether that is news.
        """
        is_first = self._found_bytes == self.limit_bytes
        reading = self._gauge.read()
        least = self._gauge.others_bytes(reading) + self._least_bytes
        self._found_bytes = min(self._found_bytes - nbytes, max(reading.now, least))
        return is_first

    def end_run(self) -> None:
        """The phase is over, for now."""
        for phase, units in self._seen.items():
            if len(units) >= _KNOWN_SHARE * self._units:
                self._known.add(phase)
