"""The tuner's search, on machines that are functions: it ends near the best of a whole sweep."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from offload.planning.profile import Tuning
from offload.tools.tune.search import Knob, Measured, Search, SearchSpace, spread_s

KI, MI = 1 << 10, 1 << 20
LAYERS, LAYER_BYTES, STATE_BYTES = 24, 32 * MI, 512 * MI
DERIVED_DEPTH, DERIVED_CHUNK, DERIVED_QUEUE, CORES = 2, MI, 16, 8
NO_LIMIT_S = 1e9


@dataclass(frozen=True)
class Machine:
    """A function from a tuning to the seconds of a step, as the engine's parts would have it: reads
    of parameters hidden behind the compute of so many units, optimizer state that streams in
    chunks, an update.
    """

    disk_bytes_per_s: float
    best_queue: int
    compute_s: float  # of one layer
    ahead_bytes: int  # for parameters in flight
    buffer_bytes: int  # for chunks
    best_threads: int
    start_s: float  # of each disk operation

    def step_s(self, tuning: Tuning) -> float:
        depth = DERIVED_DEPTH if tuning.prefetch_depth is None else tuning.prefetch_depth
        unit_bytes = tuning.unit_bytes or LAYER_BYTES
        queue = tuning.queue_depth or DERIVED_QUEUE
        rate = self.disk_bytes_per_s * min(1.0, (queue / self.best_queue) ** 0.5)
        rate *= min(1.0, (4 * self.best_queue / queue) ** 0.2)  # too many slow each other down
        return (
            self._passes_s(depth, unit_bytes, rate)
            + self._state_s(tuning.chunk_numel or DERIVED_CHUNK, rate)
            + self._update_s(tuning.threads or CORES)
        )

    def _passes_s(self, depth: int, unit_bytes: int, rate: float) -> float:
        """Return the seconds of forward and backward: each unit's read is hidden as far as there is
        room and compute.
        """
        units = LAYERS * LAYER_BYTES / unit_bytes
        read_s = self.start_s + unit_bytes / rate
        compute_s = self.compute_s * unit_bytes / LAYER_BYTES
        room = self.ahead_bytes / unit_bytes
        hidden = min(1.0, depth / 3, room)  # a few units ahead hide the jitter
        each_s = max(compute_s, read_s) + (1 - hidden) * min(compute_s, read_s)
        too_many = max(0.0, depth - room)  # blocks that are evicted before their use
        return 2 * units * (each_s + 0.15 * too_many * read_s)

    def _state_s(self, chunk: int, rate: float) -> float:
        nbytes = 12 * chunk
        buffers = max(1.0, self.buffer_bytes / nbytes)
        overlap = 1 + 1 / buffers
        return (2 * STATE_BYTES / rate) * overlap + STATE_BYTES / nbytes * self.start_s

    def _update_s(self, threads: int) -> float:
        return 0.8 / min(threads, self.best_threads) + 0.01 * max(0, threads - self.best_threads)

    def refuses(self, tuning: Tuning) -> bool:
        return (tuning.unit_bytes or LAYER_BYTES) > self.ahead_bytes + LAYER_BYTES


SLOW_DISK = Machine(3e8, 4, 0.1, 8 * LAYER_BYTES, 128 * MI, 4, 5e-3)
FAST_DISK = Machine(6e9, 32, 0.03, 8 * LAYER_BYTES, 512 * MI, 8, 1e-3)
SMALL_BUDGET = Machine(2e9, 16, 0.03, LAYER_BYTES, 24 * MI, 6, 2e-4)
MACHINES = {"slow disk": SLOW_DISK, "fast disk": FAST_DISK, "small budget": SMALL_BUDGET}
SPACE = SearchSpace(
    Tuning(),
    (
        Knob("prefetch_depth", tuple(range(9)), (0, 1, 2, 4, 8)),
        Knob(
            "chunk_numel",
            (256 * KI, 512 * KI, MI, 2 * MI, 4 * MI),
            (256 * KI, MI, 4 * MI),
            derived=MI,
        ),
        Knob("queue_depth", (4, 8, 16, 32, 64), (4, 16, 64), derived=16),
        Knob(
            "unit_bytes",
            (LAYER_BYTES, 2 * LAYER_BYTES, 4 * LAYER_BYTES),
            (2 * LAYER_BYTES,),
            derived=LAYER_BYTES,
        ),
        Knob("threads", (1, 2, 4, 8), (1, 2, 4), derived=8),
    ),
)


@dataclass
class Bench:
    """A measurement with noise: each trial is a bit off as a whole, and each step again."""

    machine: Machine
    noise: float
    seed: int
    trial_s: float = 10.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.asked: list[Tuning] = []

    def __call__(self, tuning: Tuning) -> Measured:
        self.asked.append(tuning)
        if self.machine.refuses(tuning):
            return Measured((), self.trial_s, failure="CapacityError: no room")
        whole = self.machine.step_s(tuning) * math.exp(self._random.gauss(0, self.noise))
        seconds = tuple(whole * math.exp(self._random.gauss(0, self.noise)) for _ in range(5))
        return Measured(seconds, self.trial_s)


@cache
def every() -> list[Tuning]:
    """Return every tuning of the space: for an exhaustive sweep."""
    found = [SPACE.base]
    for knob in SPACE.knobs:
        found = [turned for tuning in found for turned in (tuning, *knob.turns(tuning))]
    return list(dict.fromkeys(found))


@cache
def best_s(machine: Machine) -> float:
    return min(machine.step_s(t) for t in every() if not machine.refuses(t))


def search(machine: Machine, noise: float, seed: int, limit_s: float = NO_LIMIT_S) -> Tuning:
    return Search(SPACE, Bench(machine, noise, seed), limit_s).run()


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_it_ends_within_5_percent_of_the_best_of_all(name: str, noise: float, seed: int) -> None:
    machine = MACHINES[name]
    assert len(every()) == 10 * 5 * 5 * 3 * 4
    for number in range(20):
        found = search(machine, noise, seed + number)
        assert machine.step_s(found) <= 1.05 * best_s(machine), (number, found)


@pytest.mark.parametrize("name", MACHINES)
def test_the_machines_leave_something_to_find(name: str) -> None:
    machine = MACHINES[name]
    assert machine.step_s(Tuning()) > 1.07 * best_s(machine)


def test_they_want_different_things() -> None:
    found = {search(machine, 0.0, 0) for machine in MACHINES.values()}
    assert len(found) == len(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_ten_minutes_of_trials_are_enough(name: str, seed: int) -> None:
    machine = MACHINES[name]
    asked = []
    for number in range(20):
        bench = Bench(machine, 0.02, seed + number)
        found = Search(SPACE, bench, 600.0).run()
        assert len(bench.asked) * bench.trial_s <= 600.0
        assert machine.step_s(found) <= 1.05 * best_s(machine), (number, found)
        asked.append(len(bench.asked))
    assert statistics.mean(asked) < 60  # of 3000


def test_the_same_measurements_lead_to_the_same_trials(seed: int) -> None:
    one, other = Bench(SLOW_DISK, 0.03, seed), Bench(SLOW_DISK, 0.03, seed)
    first, second = (Search(SPACE, bench, 500.0) for bench in (one, other))
    assert first.run() == second.run() and first.trials == second.trials
    assert one.asked == other.asked


# --- what beats what ------------------------------------------------------------------------------


def flat(noise: float, seed: int) -> Callable[[Tuning], Measured]:
    rng = random.Random(seed)

    def measure(tuning: Tuning) -> Measured:
        whole = math.exp(rng.gauss(0, noise))
        return Measured(tuple(whole * math.exp(rng.gauss(0, noise)) for _ in range(3)), 1.0)

    return measure


def test_where_nothing_matters_the_base_stays(seed: int) -> None:
    """One of fifty trials is always the luckiest; measured again beside the base it is not."""
    kept = [Search(SPACE, flat(0.05, seed + n), NO_LIMIT_S).run() == Tuning() for n in range(40)]
    assert sum(kept) >= 30
    assert all(Search(SPACE, flat(0.0, n), NO_LIMIT_S).run() == Tuning() for n in range(3))


def test_one_lucky_trial_is_not_believed() -> None:
    """Twice as fast once, and as slow as all others ever after."""
    times: Counter[Tuning] = Counter()
    lucky = Tuning(prefetch_depth=4)

    def measure(tuning: Tuning) -> Measured:
        times[tuning] += 1
        return Measured((0.5 if tuning == lucky and times[tuning] == 1 else 1.0,) * 3, 1.0)

    assert Search(SPACE, measure, NO_LIMIT_S).run() == Tuning()
    assert times[lucky] > 1


def test_the_winner_is_measured_beside_the_base_at_the_end() -> None:
    bench = Bench(SLOW_DISK, 0.0, 1)
    found = Search(SPACE, bench, NO_LIMIT_S).run()
    assert bench.asked[-4:] == [found, Tuning()] * 2


def test_a_winner_that_the_end_does_not_confirm_is_dropped() -> None:
    """From some moment on the machine is slower with every tuning but the base."""
    asked = itertools.count()
    bench = Bench(SLOW_DISK, 0.0, 1)
    total = len(Search(SPACE, bench, NO_LIMIT_S).run() and bench.asked)

    def measure(tuning: Tuning) -> Measured:
        is_end = next(asked) >= total - 4
        measured = bench(tuning)
        if is_end and tuning != Tuning():
            return Measured(tuple(10 * s for s in measured.seconds), 1.0)
        return measured

    assert Search(SPACE, measure, NO_LIMIT_S).run() == Tuning()


def test_a_tuning_that_fails_is_passed_over() -> None:
    def measure(tuning: Tuning) -> Measured:
        if tuning.prefetch_depth in (4, 8):
            return Measured((), 1.0, failure="no room")
        return Measured((0.5 if tuning.prefetch_depth == 3 else 1.0,) * 3, 1.0)

    found = Search(SPACE, measure, NO_LIMIT_S).run()
    assert found == Tuning() or found.prefetch_depth in (0, 1, 2, 3)


def test_noise_is_what_repeats_differ_by(seed: int) -> None:
    rng = random.Random(seed)
    search = Search(SPACE, lambda _: Measured((1.0,), 1.0), NO_LIMIT_S)
    for number in range(200):
        tuning = Tuning(prefetch_depth=number % 9)
        search.take(
            tuning, Measured((2.0**tuning.prefetch_depth * math.exp(rng.gauss(0, 0.04)),), 1.0)
        )
    assert 0.035 < search.noise < 0.045


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [1, 2, 5, 6, 9, 17, 30])
def test_all_trials_together_keep_to_the_limit(trials: int) -> None:
    bench = Bench(SLOW_DISK, 0.0, 1)
    search = Search(SPACE, bench, trials * bench.trial_s)
    search.run()
    assert 1 <= len(bench.asked) <= trials
    assert search.left_s == (trials - len(bench.asked)) * bench.trial_s


def test_a_trial_that_was_made_before_is_not_repeated_without_need() -> None:
    bench = Bench(SLOW_DISK, 0.0, 1)
    search = Search(SPACE, bench, NO_LIMIT_S)
    search.take(Tuning(), bench(Tuning()))
    search.run()
    assert bench.asked[:3] == [Tuning(), Tuning(), Tuning(prefetch_depth=0)]


def test_what_breaks_it_off_leaves_the_best_so_far() -> None:
    bench = Bench(SLOW_DISK, 0.0, 1)
    total = len(Search(SPACE, bench, NO_LIMIT_S).run() and bench.asked)
    bench.asked.clear()

    def measure(tuning: Tuning) -> Measured:
        if len(bench.asked) == total - 10:
            raise KeyboardInterrupt
        return bench(tuning)

    search = Search(SPACE, measure, NO_LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert search.best != Tuning() and search.step_s(search.best) < search.step_s(Tuning())
    assert len(search.trials) == total - 10


# --- small parts ----------------------------------------------------------------------------------


def test_a_knob_leaves_to_be_derived_what_would_be_derived() -> None:
    knob = SPACE.knobs[2]
    assert knob.turned(Tuning(threads=2), 16) == Tuning(threads=2)
    assert knob.turned(Tuning(threads=2), 64) == Tuning(threads=2, queue_depth=64)
    assert [turned.queue_depth for turned in knob.turns(Tuning())] == [4, 8, None, 32, 64]
    assert Tuning() not in SPACE.knobs[0].turns(Tuning())  # its derived value is not known


@pytest.mark.parametrize(
    ("best", "derived", "coarse", "asked"),
    [
        (None, 16, (), {8, 32}),
        (64, 16, (64,), {64, 32}),
        # What is derived is not known: beside the fastest, 16, then 32.
        (None, None, (4, 16), {4, 16, 8, 32, 64}),
    ],
)
def test_neighbours_of_the_best_are_tried(
    best: int | None, derived: int | None, coarse: tuple[int, ...], asked: set[int]
) -> None:
    tried = {}

    def measure(tuning: Tuning) -> Measured:
        queue = tuning.queue_depth
        tried[queue] = 0.5 if queue == best else 1.0 + 1.0 / (queue or 99)
        return Measured((tried[queue],), 1.0)

    knob = Knob("queue_depth", (4, 8, 16, 32, 64), coarse, derived)
    Search(SearchSpace(Tuning(), (knob,)), measure, NO_LIMIT_S).run()
    assert set(tried) == {None, *asked}


def test_spread_is_half_the_middle_half() -> None:
    assert spread_s([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
    assert spread_s([1.0]) == spread_s([]) == 0.0
