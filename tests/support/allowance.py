"""A device whose memory is only counted, and what `Allowance` must do with it in any case. These
checks are also made of the faulty versions in `device/mutants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from offload.tiers.allowance import Allowance
from offload.transfer import DeviceReading

LIMIT, LEAST, UNITS = 1000, 100, 4


class Gauge:
    """Stands for `DeviceGauge`. blocks, others: bytes that they hold."""

    def __init__(self, others: int = 0) -> None:
        self.blocks, self.others = 0, others
        self._peak = self._ever = others

    def grow(self, others: int = 0, blocks: int = 0) -> None:
        self.others += others
        self.blocks += blocks
        self._ever += max(0, others) + max(0, blocks)
        self._peak = max(self._peak, self.others + self.blocks)

    def read(self) -> DeviceReading:
        return DeviceReading(self.others + self.blocks, self._peak, self._ever)

    def others_bytes(self, reading: DeviceReading) -> int:
        return reading.now - self.blocks


def allowance_of(
    gauge: Gauge, reclaimable: Callable[[], int] = lambda: 0, least: int = LEAST
) -> Allowance:
    gauge_of_device: Any = gauge
    return Allowance(gauge_of_device, LIMIT, least, UNITS, reclaimable)


def run(
    allowance: Allowance,
    gauge: Gauge,
    phase: Hashable = "forward",
    growths: Iterable[int] = (0, 0, 0, 0),
) -> None:
    """One run of that phase, unit by unit; others grow so far within each, and are gone after."""
    for unit, growth in enumerate(growths):
        with allowance.moving((phase, unit)):
            pass
        gauge.grow(growth)
        gauge.grow(-growth)
    with allowance.moving():
        pass
    allowance.end_run()


def begins_with_the_least() -> None:
    gauge = Gauge(others=50)
    allowance = allowance_of(gauge)
    assert allowance.blocks_bytes == LEAST, "nothing runs"
    with allowance.moving(("forward", 0)):
        assert allowance.blocks_bytes == LEAST, "nothing is known"
    run(allowance, gauge)
    with allowance.moving(("forward", 0)):
        assert allowance.blocks_bytes == LIMIT - 50, "all that others leave"
    with allowance.moving(("backward", 0)):
        assert allowance.blocks_bytes == LEAST, "of this phase nothing is known"


def leaves_room() -> None:
    gauge = Gauge(others=50)
    allowance = allowance_of(gauge)
    run(allowance, gauge, growths=(10, 60, 20, 0))
    with allowance.moving(("forward", 0)):
        assert allowance.blocks_bytes == LIMIT - 50 - 2 * 60, "twice the largest growth"


CHECKS = [begins_with_the_least, leaves_room]
