"""Measures how fast drives move optimizer state: reads, writes, both; in bursts and sustained. And
the slowdown of a computation while the drives are busy: both use memory and cores.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from offload.core.locks import Flag
from offload.optim.traffic import StateTrafficFigures, Traffic
from offload.planning.layout import Chunk
from offload.tools.bench.figure import Figure, FigureUnit, Repeats, repeat
from offload.tools.bench.sizes import ROUNDS, RUNS_A_TENTH, TENTHS, Bench, BenchSizes

_MOST_RUNS = 1000  # beside busy drives, in one turn


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


def _patience(sizes: BenchSizes) -> Callable[[], bool]:
    """Make a condition that ends a run over a slow drive early: it is true for some more chunks
    than there are buffers, and for half of the seconds from now on.
    """
    deadline_s, chunks = time.perf_counter() + sizes.seconds / 2, count()
    return lambda: next(chunks) <= 2 * sizes.buffers or time.perf_counter() < deadline_s


def fill(bench: Bench, traffic: Traffic, label: str) -> None:
    """Write the chunks that all other measurements read and write. label: for the progress."""
    bench.progress.begin(f"{label}: fill")
    traffic.fill(_patience(bench.sizes))


def measure_disk(
    bench: Bench, traffic: Traffic, directories: Sequence[Path], label: str
) -> DiskFigures:
    """Fill these directories, on which the traffic is, then measure writes, reads and both."""

    def figure(kind: str, act: Callable[[Callable[[], bool]], StateTrafficFigures]) -> Figure:
        def run() -> float:
            return _rate(act(_patience(bench.sizes)))

        return bench.measure(f"{label}: {kind}", FigureUnit.BYTES_PER_S, run, runs, warm_up=False)

    most = bench.sizes.disk_runs
    runs = Repeats(bench.sizes.seconds, min(2, most), most)
    fill(bench, traffic, label)
    write, read = figure("write", traffic.write), figure("read", traffic.read)
    return DiskFigures(tuple(map(str, directories)), read, write, figure("mixed", traffic.mix))


def _rate(moved: StateTrafficFigures) -> float:
    rate = moved.bytes_per_s
    assert rate is not None, "there are more chunks than buffers, so that some must move"
    return rate


def measure_sustained(bench: Bench, traffic: Traffic, label: str) -> tuple[Figure, Figure]:
    """Measure the bytes per second, read and written, in the first and in the last tenth of the
    bytes that move after the fill. The fill is not measured; it fills the drives' caches, too.
    """
    progress = bench.progress
    progress.begin(f"{label}: sustained, fill")
    total = len(traffic.plan.chunks)

    def filling() -> bool:
        progress.at(len(traffic.chunks) / total)
        return True

    traffic.fill(filling)
    progress.begin(f"{label}: sustained")
    rates: list[list[float]] = [[] for _ in range(TENTHS)]
    runs, at = TENTHS * RUNS_A_TENTH, 0
    for number in range(runs):
        progress.at(number / runs)
        end = bench.sizes.sustained_chunks * (number + 1) // runs
        rate = _mix_for(traffic, at, end).bytes_per_s
        if rate is not None:  # None: the buffers held all chunks of a short run
            rates[number // RUNS_A_TENTH].append(rate)
        at = end
    name, unit = f"{label}: sustained,", FigureUnit.BYTES_PER_S
    first = bench.done(f"{name} first tenth", unit, rates[0])
    return first, bench.done(f"{name} last tenth", unit, rates[-1])


def _mix_for(traffic: Traffic, begin: int, end: int) -> StateTrafficFigures:
    """Read and write the chunks [begin, end) of an endless sequence that repeats all chunks."""
    moved = StateTrafficFigures(0, 0, 0.0)
    while begin < end:
        here = begin % len(traffic.chunks)
        part: list[Chunk] = traffic.chunks[here : here + end - begin]
        moved += traffic.mix(chunks=part)
        begin += len(part)
    return moved


# --- a computation beside busy drives -------------------------------------------------------------


def measure_beside(
    bench: Bench, name: str, seconds_of: Callable[[], float], traffic: Traffic
) -> Figure | None:
    """Measure the speed beside busy drives, as a share of the speed alone. Runs alone and runs
    beside busy drives take turns, so that a change in the machine's speed affects both alike.

    seconds_of: makes one run, which takes much less than a second, and returns its seconds. Returns
    None if the drives were always done before a run was.
    """
    bench.progress.begin(name)
    shares = []
    runs = Repeats(bench.sizes.seconds / (2 * ROUNDS), 1, _MOST_RUNS)
    for number in range(ROUNDS):
        bench.progress.at(number / ROUNDS)
        alone_s = statistics.median(repeat(seconds_of, runs))
        beside = _beside_s(seconds_of, traffic, runs, bench.sizes.beside_bytes // ROUNDS)
        if beside:
            shares.append(alone_s / statistics.median(beside))
    return bench.done(name, FigureUnit.SHARE, shares) if shares else None


def _beside_s(
    seconds_of: Callable[[], float], traffic: Traffic, runs: Repeats, most_written_bytes: int
) -> list[float]:
    """Return the seconds of each run during which the drives were busy all the time."""
    each_s: list[float] = []
    with _busy(traffic, most_written_bytes) as is_busy:
        begin_s = time.perf_counter()
        while len(each_s) < runs.most:
            run_s = seconds_of()
            if not is_busy():
                break
            each_s.append(run_s)
            if time.perf_counter() - begin_s >= runs.seconds:
                break
    return each_s


@contextmanager
def _busy(traffic: Traffic, most_written_bytes: int) -> Iterator[Callable[[], bool]]:
    """Keep the drives busy while the block runs: another thread reads and writes until it has
    written `most_written_bytes`. Yields a function that returns whether the thread is still at
    work. Raises an error of the drives when the block ends.
    """
    stop, begun = Flag(), Flag()
    last_bytes = traffic.written_bytes + most_written_bytes
    errors: list[BaseException] = []

    def keep_going() -> bool:
        begun.set()
        return not stop.is_set and traffic.written_bytes < last_bytes

    def work() -> None:
        try:
            while keep_going():
                traffic.mix(keep_going)
        except BaseException as error:
            errors.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=work, name="busy drives", daemon=True)
    thread.start()
    try:
        begun.wait("first operation of the drives")
        yield lambda: thread.is_alive() and keep_going()
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
