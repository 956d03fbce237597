"""Measures how fast drives move optimizer state: reads, writes, both; in bursts and sustained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offload.optim.traffic import StateTrafficFigures, Traffic
from offload.planning.layout import Chunk
from offload.tools.bench.figure import Figure, FigureUnit, Listener, repeat
from offload.tools.bench.sizes import RUNS_A_TENTH, TENTHS, BenchSizes


@dataclass(frozen=True)
class DiskFigures:
    """The figures of one directory, or of several used together. first, last: the speed in the
    first and in the last tenth of the bytes of a sustained run of reads and writes; None: not
    measured.
    """

    directories: tuple[str, ...]
    read: Figure
    write: Figure
    mixed: Figure
    first: Figure | None = None
    last: Figure | None = None

    @property
    def all(self) -> list[Figure]:
        every = (self.read, self.write, self.mixed, self.first, self.last)
        return [figure for figure in every if figure is not None]


class _Patience:
    """A condition that ends a run over a slow drive early: it is true for at least
    `least_chunks` calls, and until `seconds` have passed since it was made.
    """

    def __init__(self, seconds: float, least_chunks: int) -> None:
        self._deadline_s = time.perf_counter() + seconds
        self._left = least_chunks

    def __call__(self) -> bool:
        self._left -= 1
        return self._left >= 0 or time.perf_counter() < self._deadline_s


def _patience(sizes: BenchSizes) -> _Patience:
    return _Patience(sizes.seconds / 2, 2 * sizes.buffers + 1)


def fill(traffic: Traffic, sizes: BenchSizes, label: str, listener: Listener) -> None:
    """Write the chunks that all other measurements read and write. label: for the listener."""
    listener.begin(f"{label}: fill")
    traffic.fill(_patience(sizes))


def measure_disk(
    traffic: Traffic, directories: Iterable[str], sizes: BenchSizes, label: str, listener: Listener
) -> DiskFigures:
    """Measure writes, reads and both together. traffic: on these directories, already filled."""

    def measure(kind: str, act: Callable[[Callable[[], bool]], StateTrafficFigures]) -> Figure:
        name = f"{label}: {kind}"
        listener.begin(name)
        runs = sizes.writing_runs
        rates = repeat(lambda: _rate(act(_patience(sizes))), runs, listener.at, warm_up=False)
        figure = Figure.of(name, FigureUnit.BYTES_PER_S, rates)
        listener.done(figure)
        return figure

    write = measure("write", traffic.write)
    read = measure("read", traffic.read)
    mixed = measure("mixed", traffic.mix)
    return DiskFigures(tuple(directories), read, write, mixed)


def _rate(moved: StateTrafficFigures) -> float:
    rate = moved.bytes_per_s
    assert rate is not None, "there are more chunks than buffers, so that some must move"
    return rate


def measure_sustained(
    traffic: Traffic, sizes: BenchSizes, label: str, listener: Listener
) -> tuple[Figure, Figure]:
    """Measure the bytes per second, read and written, in the first and in the last tenth of the
    bytes that move after the fill. The fill is not measured; it fills the drives' caches, too.
    """
    listener.begin(f"{label}: sustained, fill")
    total = len(traffic.plan.chunks)

    def filling() -> bool:
        listener.at(len(traffic.chunks) / total)
        return True

    traffic.fill(filling)
    listener.begin(f"{label}: sustained")
    rates: list[list[float]] = [[] for _ in range(TENTHS)]
    runs, at = TENTHS * RUNS_A_TENTH, 0
    for number in range(runs):
        listener.at(number / runs)
        end = sizes.sustained_chunks * (number + 1) // runs
        rate = _mix_for(traffic, at, end).bytes_per_s
        if rate is not None:  # None: the buffers held all chunks of a short run
            rates[number // RUNS_A_TENTH].append(rate)
        at = end
    figures = []
    for when, each in (("first", rates[0]), ("last", rates[-1])):
        name = f"{label}: sustained, {when} tenth"
        figures.append(Figure.of(name, FigureUnit.BYTES_PER_S, each))
        listener.done(figures[-1])
    return figures[0], figures[1]


def _mix_for(traffic: Traffic, begin: int, end: int) -> StateTrafficFigures:
    """Read and write the chunks [begin, end) of an endless sequence that repeats all chunks."""
    moved = StateTrafficFigures(0, 0, 0.0)
    while begin < end:
        here = begin % len(traffic.chunks)
        part: list[Chunk] = traffic.chunks[here : here + end - begin]
        moved += traffic.mix(chunks=part)
        begin += len(part)
    return moved
