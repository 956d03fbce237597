"""Memory of each tier over time, beside its budget, from the samples of a run. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offload.telemetry.run_file import Run

HOST: Final = "host"
DEVICE: Final = "device"
_ORDER: Final = (DEVICE, HOST, "disk", "process")


@dataclass(frozen=True)
class Band:
    """Bytes at each of the tier's times."""

    label: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryBands:
    """Bands lie on each other. budget_bytes: that may be held here; None: no limit is known."""

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
    """In the order of their speed; none where no memory was sampled."""
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
    """On a CPU torch itself holds the gradients: they are set aside, but in no pool of ours whose
    bytes are sampled.
    """
    set_aside = run.about.shares.get("gradients", 0)
    if HOST in bands and set_aside and run.about.device == "cpu":
        bands[HOST].insert(0, Band("gradients (set aside)", (set_aside,) * count))
