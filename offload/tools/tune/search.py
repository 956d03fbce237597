"""The search of `offload tune`: which tuning to try next, and which one is best. Pure.

It asks a function for measurements and decides by them and by the seconds that they took: given the
same measurements it does the same. No clock, no files, no torch.

One knob after the other, the most telling first: coarse values, then the neighbours of the best.
What is not worse than the best so far is measured again beside it, the better half of that once
more, until one is left and the matter is clear (successive halving); it takes the place of the best
only if it is better by more than the noise, which is what repeats of the same tuning differ by.
When all knobs were turned, neighbours are tried again from where the search has come to, until
nothing helps or time is up. At the end the winner and the base are measured again by turns, and
only those runs count: who was best of many was also lucky.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from offload.planning.profile import Tuning

_LEAST_NOISE = 0.01  # of a step, before repeats have shown another one
_NOISE_WEIGHT = 2  # as many repeats does that count for
_MOST_REPEATS = 4  # of a rival
_WORTH = 0.01  # of a step; what cannot be better by more is not measured further
_LEAST_FINAL_ROUNDS, _MOST_FINAL_ROUNDS = 2, 6
_BEATEN = 2.0  # the lead over the base, in units of the doubt, that is no luck any more
_EVIDENT = 6.0  # one that two rounds are enough for
_RESERVED, _LEAST_RESERVED = 6, 2  # trials for the end: rounds of two


@dataclass(frozen=True)
class Knob:
    """One field of `Tuning`. values: in order, without None, which means that the engine derives
    it. coarse: those to try first. derived: what None comes to, if that is known.
    """

    field: str
    values: tuple[Any, ...]
    coarse: tuple[Any, ...]
    derived: Any = None

    def turned(self, tuning: Tuning, value: Any) -> Tuning:
        """With that value; what would be derived anyway is left to be derived."""
        return replace(tuning, **{self.field: None if value == self.derived else value})

    def neighbours(self, tuning: Tuning) -> list[Tuning]:
        """The next lower and the next higher value."""
        value = getattr(tuning, self.field)
        value = self.derived if value is None else value
        if value not in self.values:
            return []
        at = self.values.index(value)
        near = [self.values[i] for i in (at - 1, at + 1) if 0 <= i < len(self.values)]
        return [self.turned(tuning, v) for v in near]


@dataclass(frozen=True)
class SearchSpace:
    """base: what every other is compared with; all derived, but for what must be given."""

    base: Tuning
    knobs: tuple[Knob, ...]

    def every(self) -> Iterator[Tuning]:
        """All of it, the base among them: for an exhaustive sweep."""
        choices = [
            dict.fromkeys([getattr(self.base, knob.field), *knob.values]) for knob in self.knobs
        ]
        seen: set[Tuning] = set()
        for values in product(*choices):
            tuning = self.base
            for knob, value in zip(self.knobs, values, strict=True):
                tuning = knob.turned(tuning, value)
            if tuning not in seen:
                seen.add(tuning)
                yield tuning


@dataclass(frozen=True)
class Measured:
    """Of one trial. seconds: of each whole iteration; none where it failed. took_s: all of it, with
    its start.
    """

    seconds: tuple[float, ...]
    took_s: float
    stall_share: float = 0.0
    failure: str | None = None

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds) if self.seconds else math.inf


@dataclass(frozen=True)
class TunedTrial:
    number: int
    tuning: Tuning
    measured: Measured


@dataclass(frozen=True)
class Finding:
    """best: the base, unless another one has really beaten it. noise: of a trial's median, as a
    share. step_s, spread_s: of the best; base_s: of the base.
    """

    best: Tuning
    base: Tuning
    step_s: float
    spread_s: float
    base_s: float
    stall_share: float
    noise: float


class Search:
    """One search. limit_s: seconds that all trials may take together. tell: hears of each trial
    when it has ended. Whoever breaks it off by an exception from `measure` finds what was best so
    far in `finding()`.
    """

    def __init__(
        self,
        space: SearchSpace,
        measure: Callable[[Tuning], Measured],
        limit_s: float,
        tell: Callable[[TunedTrial], None] = lambda trial: None,
    ) -> None:
        self.space = space
        self.best = space.base
        self.trials: list[TunedTrial] = []
        self.was_cut = False  # there was something left to try, and no time
        self._measure = measure
        self._limit_s = limit_s
        self._tell = tell
        self._runs: dict[Tuning, list[Measured]] = {}

    @property
    def spent_s(self) -> float:
        return sum(trial.measured.took_s for trial in self.trials)

    @property
    def left_s(self) -> float:
        return max(0.0, self._limit_s - self.spent_s)

    def take(self, tuning: Tuning, measured: Measured) -> None:
        """One that was measured already."""
        self._runs.setdefault(tuning, []).append(measured)
        self.trials.append(TunedTrial(len(self.trials) + 1, tuning, measured))
        self._tell(self.trials[-1])

    def run(self) -> Finding:
        base = self.space.base
        while len(self._runs.get(base, ())) < 2 and (base not in self._runs or self._has_time(1)):
            self._try(base)
        for knob in self.space.knobs:
            self._contest([knob.turned(self.best, value) for value in knob.coarse])
            self._refine(knob)
        before: Tuning | None = None
        while before != self.best:
            before = self.best
            for knob in self.space.knobs:
                self._refine(knob)
        self._decide()
        return self.finding()

    def finding(self) -> Finding:
        """As far as it has come."""
        base, best = self.space.base, self.best
        runs = self._good(best)
        return Finding(
            best=best,
            base=base,
            step_s=self.step_s(best),
            spread_s=spread_s([s for run in runs for s in run.seconds]),
            base_s=self.step_s(base),
            stall_share=statistics.median(r.stall_share for r in runs) if runs else 0.0,
            noise=self.noise,
        )

    def step_s(self, tuning: Tuning) -> float:
        """Of a whole iteration, over all trials of it; infinite where none went well."""
        runs = self._good(tuning)
        return statistics.median(run.step_s for run in runs) if runs else math.inf

    @property
    def noise(self) -> float:
        """Of a trial's median, as a share: the deviation of repeats, pooled over all tunings."""
        squares = _NOISE_WEIGHT * _LEAST_NOISE**2
        degrees = _NOISE_WEIGHT
        for tuning in self._runs:
            logs = [math.log(run.step_s) for run in self._good(tuning)]
            if len(logs) > 1:
                middle = statistics.fmean(logs)
                squares += sum((value - middle) ** 2 for value in logs)
                degrees += len(logs) - 1
        return math.sqrt(squares / degrees)

    # --- one knob ---------------------------------------------------------------------------------

    def _refine(self, knob: Knob) -> None:
        """Go to better neighbours until there are none."""
        before: Tuning | None = None
        while before != self.best:
            before = self.best
            self._contest(knob.neighbours(self._located(knob)))

    def _located(self, knob: Knob) -> Tuning:
        """The best, or where nobody knows what its value of the knob comes to, the best of those
        that have one and are like it otherwise.
        """
        given = [knob.turned(self.best, value) for value in knob.values]
        if self.best in given or not knob.values:
            return self.best
        return min(given, key=self.step_s)

    def _contest(self, rivals: Sequence[Tuning]) -> None:
        """Measure those that are new; those that are not worse again beside the best, and the
        better half of them, until it is clear whether the last one is better. Then it is the best.
        """
        new = [rival for rival in dict.fromkeys(rivals) if rival not in self._runs]
        for rival in new:
            if self._has_time(1):
                self._try(rival)
        standing = self._standing(new)
        for _ in range(_MOST_REPEATS):
            is_clear = len(standing) < 2 and all(self._is_clear(one) for one in standing)
            if is_clear or not self._has_time(1 + len(standing)):
                break
            for tuning in (self.best, *standing):
                self._try(tuning)
            standing = self._standing(standing)
        if standing and self._lead(standing[0]) > 1:
            self.best = standing[0]

    def _standing(self, tunings: Sequence[Tuning]) -> list[Tuning]:
        """Of those that are not worse than the best by more than the noise, the better half."""
        left = sorted((t for t in tunings if self._lead(t) > -1), key=self.step_s)
        return left[: -(-len(left) // 2)]

    def _is_clear(self, tuning: Tuning) -> bool:
        """Whether it was measured twice and is better without much doubt, or not worth more
        trials.
        """
        unit = _doubt(self._good(tuning), self._good(self.best), self.noise)
        lead = self._lead(tuning)
        return len(self._good(tuning)) > 1 and (lead > 2 or (lead + 2) * unit < _WORTH)

    def _lead(self, tuning: Tuning) -> float:
        """By how much it is better than the best, in units of the doubt about both."""
        return _lead(self._good(tuning), self._good(self.best), self.noise)

    # --- the end ----------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Is the winner really better than the base? Both are measured again, by turns."""
        base, best = self.space.base, self.best
        if best == base:
            return
        fresh: dict[Tuning, list[Measured]] = {best: [], base: []}
        for number in range(_MOST_FINAL_ROUNDS):
            enough = _BEATEN if number > _LEAST_FINAL_ROUNDS else _EVIDENT
            is_clear = not 0 < self._fresh_lead(fresh) <= enough
            if (is_clear and number >= _LEAST_FINAL_ROUNDS) or not self._has_time(2, reserved=0):
                break
            for tuning in fresh:
                fresh[tuning].append(self._try(tuning))
        if self._fresh_lead(fresh) <= _BEATEN:
            self.best = base

    def _fresh_lead(self, fresh: dict[Tuning, list[Measured]]) -> float:
        """Of the first over the second; by all trials where there are no fresh ones."""
        seen = [[run for run in runs if run.failure is None] for runs in fresh.values()]
        if not any(fresh.values()):
            seen = [self._good(tuning) for tuning in fresh]
        return _lead(seen[0], seen[1], self.noise)

    # --- trials -----------------------------------------------------------------------------------

    def _try(self, tuning: Tuning) -> Measured:
        self.take(tuning, self._measure(tuning))
        return self.trials[-1].measured

    def _good(self, tuning: Tuning) -> list[Measured]:
        return [run for run in self._runs.get(tuning, ()) if run.failure is None]

    def _has_time(self, trials: int, reserved: int | None = None) -> bool:
        """For so many, and for the end."""
        if reserved is None:
            reserved = _LEAST_RESERVED if self.best == self.space.base else _RESERVED
        usual_s = statistics.median(t.measured.took_s for t in self.trials) if self.trials else 0.0
        has_time = (trials + reserved) * usual_s <= self.left_s
        self.was_cut |= not has_time
        return has_time


def spread_s(seconds: Sequence[float]) -> float:
    """Half of the middle half's width."""
    if len(seconds) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / 2


def _doubt(one: Sequence[Measured], other: Sequence[Measured], noise: float) -> float:
    """The noise of how the medians of some trials compare, as a share."""
    return noise * math.sqrt(1 / max(1, len(one)) + 1 / max(1, len(other)))


def _lead(one: Sequence[Measured], other: Sequence[Measured], noise: float) -> float:
    """By how much the first is faster, in units of the doubt."""
    if not one or not other:
        return math.inf if one else -math.inf
    first, second = (statistics.median(run.step_s for run in runs) for runs in (one, other))
    return math.log(second / first) / _doubt(one, other, noise)
