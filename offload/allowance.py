"""How much of a device's memory blocks may have, while activations and gradients come and go.

The limit is for everything on the device. What others hold is read whenever blocks move, and room
is left for what they may come to hold until blocks move again: by how much they ever grew within
one use of that phase, and as much again, for a batch that is longer than all before. As long as
little is known of a phase, blocks have the least that works.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from offload.transfer import DeviceGauge

_MARGIN = 2.0  # times the largest growth of others within one use
_KNOWN_SHARE = 0.5  # of the units have been seen in a phase: then enough is known of it


class Allowance:
    """For the blocks of one model. limit_bytes: for everything on the device. least_bytes: for
    blocks, while nothing is known of the others. One thread at a time.
    """

    def __init__(self, gauge: DeviceGauge, limit_bytes: int, least_bytes: int, units: int) -> None:
        self.limit_bytes = limit_bytes
        self.others_bytes = 0  # when blocks last began to move
        self._gauge = gauge
        self._least_bytes = least_bytes
        self._units = units
        self._since = gauge.read()
        self._use: tuple[Hashable, int] | None = None  # phase and unit that run
        self._growth: dict[Hashable, int] = {}  # by phase
        self._seen: dict[Hashable, set[int]] = {}  # units, by phase
        self._depth = 0

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

    def _look(self) -> None:
        reading = self._gauge.read()
        if self._use is not None:
            phase, unit = self._use
            growth = self._since.growth_until(reading)
            self._growth[phase] = max(self._growth.get(phase, 0), growth)
            self._seen.setdefault(phase, set()).add(unit)
        self.others_bytes = self._gauge.others_bytes(reading)

    @property
    def blocks_bytes(self) -> int:
        """What blocks may have now; may be negative."""
        phase = self._use[0] if self._use else None
        room = int(_MARGIN * self._growth.get(phase, 0))
        left = self.limit_bytes - self.others_bytes - room
        is_known = len(self._seen.get(phase, ())) >= _KNOWN_SHARE * self._units
        return left if is_known else min(left, self._least_bytes)
