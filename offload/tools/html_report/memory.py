"""The memory of each tier over time, with its budget, from the samples of a run. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offload.telemetry.run_file import Run

HOST: Final = "host"
DEVICE: Final = "device"
_ORDER: Final = (DEVICE, HOST, "disk", "process")


@dataclass(frozen=True)
class Band:
    """A kind of memory in a tier: its bytes at each of the tier's times."""

    label: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryBands:
    """The memory of one tier over time, as bands stacked on each other.

    budget_bytes: the tier's budget; None: none is known.
    """

    name: str
    times_s: tuple[float, ...]
    bands: tuple[Band, ...]
    budget_bytes: int | None

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(band.nbytes for band in self.bands), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=0)


def tiers_of(run: Run) -> tuple[MemoryBands, ...]:
    """Return the tiers, the fastest first; empty where no memory was sampled."""
    samples = sorted(run.samples, key=lambda sample: sample[0])
    if not samples:
        return ()
    times_s = tuple(at_s for at_s, _ in samples)
    bands: dict[str, list[Band]] = {}
    for number, kind in enumerate(run.memory):
        tier, _, what = kind.partition(": ")
        values = tuple(nbytes[number] for _, nbytes in samples)
        bands.setdefault(tier, []).append(Band(what or tier, values))
    _add_gradients(run, bands, len(samples))
    budgets = {HOST: run.about.host_bytes, DEVICE: run.about.device_bytes}
    known = [name for name in _ORDER if name in bands]
    return tuple(
        MemoryBands(name, times_s, tuple(bands[name]), budgets.get(name))
        for name in dict.fromkeys([*known, *bands])
    )


def _add_gradients(run: Run, bands: dict[str, list[Band]], count: int) -> None:
    """Add a constant band for gradients on a CPU: torch itself allocates them, within the share
    that the plan sets aside, so no sampled pool holds them.
    """
    set_aside = run.about.shares.get("gradients", 0)
    if HOST in bands and set_aside and run.about.device == "cpu":
        bands[HOST].insert(0, Band("gradients (set aside)", (set_aside,) * count))
