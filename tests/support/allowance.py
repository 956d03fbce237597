"""A stand-in for a device, whose memory is only counted, and checks of `DeviceBudget` with it.

The same checks run against the faulty versions of `device/mutants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from offload.device.accelerator import DeviceReading
from offload.params.device_budget import DeviceBudget

LIMIT, LEAST, UNITS = 1000, 100, 4


class Gauge:
    """A stand-in for `DeviceGauge`.

    blocks: bytes that the blocks of units hold.
    others: bytes that everything else on the device holds.
    """

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


def device_budget_of(
    gauge: Gauge, reclaimable: Callable[[], int] = lambda: 0, least: int = LEAST
) -> DeviceBudget:
    gauge_of_device: Any = gauge
    return DeviceBudget(gauge_of_device, LIMIT, least, UNITS, reclaimable)


def run(
    device_budget: DeviceBudget,
    gauge: Gauge,
    phase: Hashable = "forward",
    growths: Iterable[int] = (0, 0, 0, 0),
) -> None:
    """Run the phase unit by unit.

    growths: for each unit, the bytes by which the rest grows while it runs; they are freed after.
    """
    for unit, growth in enumerate(growths):
        with device_budget.moving((phase, unit)):
            pass
        gauge.grow(growth)
        gauge.grow(-growth)
    with device_budget.moving():
        pass
    device_budget.end_run()


def begins_with_the_least() -> None:
    gauge = Gauge(others=50)
    device_budget = device_budget_of(gauge)
    assert device_budget.blocks_bytes == LEAST, "nothing runs"
    with device_budget.moving(("forward", 0)):
        assert device_budget.blocks_bytes == LEAST, "nothing is known"
    run(device_budget, gauge)
    with device_budget.moving(("forward", 0)):
        assert device_budget.blocks_bytes == LIMIT - 50, "all that others leave"
    with device_budget.moving(("backward", 0)):
        assert device_budget.blocks_bytes == LEAST, "of this phase nothing is known"


def leaves_room() -> None:
    gauge = Gauge(others=50)
    device_budget = device_budget_of(gauge)
    run(device_budget, gauge, growths=(10, 60, 20, 0))
    with device_budget.moving(("forward", 0)):
        assert device_budget.blocks_bytes == LIMIT - 50 - 2 * 60, "twice the largest growth"


CHECKS = [begins_with_the_least, leaves_room]
