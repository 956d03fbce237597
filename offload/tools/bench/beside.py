"""Measures the slowdown of a computation while the drives are busy: both use memory and cores."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload.core.locks import Flag
from offload.optim.traffic import Traffic
from offload.tools.bench.figure import Figure, FigureUnit, Listener, Repeats, repeat
from offload.tools.bench.sizes import ROUNDS, BenchSizes

_MOST_RUNS = 1000  # in one turn


def measure_beside(
    name: str,
    seconds_of: Callable[[], float],
    traffic: Traffic,
    sizes: BenchSizes,
    listener: Listener,
) -> Figure | None:
    """Measure the speed beside busy drives, as a share of the speed alone. Runs alone and runs
    beside busy drives take turns, so that a change in the machine's speed affects both alike.

    seconds_of: makes one run, which takes much less than a second, and returns its seconds. Returns
    None if the drives were always done before a run was.
    """
    listener.begin(name)
    shares = []
    runs = Repeats(sizes.seconds / (2 * ROUNDS), 1, _MOST_RUNS)
    for number in range(ROUNDS):
        listener.at(number / ROUNDS)
        alone_s = statistics.median(repeat(seconds_of, runs, _ignore))
        beside = _beside_s(seconds_of, traffic, runs, sizes.beside_bytes // ROUNDS)
        if beside:
            shares.append(alone_s / statistics.median(beside))
    if not shares:
        return None
    figure = Figure.of(name, FigureUnit.SHARE, shares)
    listener.done(figure)
    return figure


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


def _ignore(share: float) -> None:
    """Report no progress: a turn is too short for that."""


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
