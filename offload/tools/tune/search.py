"""The search of `offload tune`: which tuning to try next, and which one is best. Pure.

It calls a function for measurements and decides by them and by the seconds that they took: the same
measurements yield the same decisions. No clock, no files, no torch.

It is a coordinate search over the knobs, the one with the largest effect first: coarse values, then
the neighbours of the best. Of these the fastest is measured again beside the best so far, until its
lead is clear or another is the fastest. It replaces the best only if it is better by more than the
noise, which is the deviation of repeats of the same tuning. After all knobs, neighbours are tried
again around the best until none helps or time is up. At the end the winner and the base are
measured again by turns, and only those runs decide: the best of many trials was also lucky
(selection bias).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.planning.profile import Tuning

_LEAST_NOISE = 0.01  # of a step: the prior of the noise, before there are repeats
_NOISE_WEIGHT = 2  # the weight of that prior, in repeats
_MOST_REPEATS = 4  # of a rival
_LEAST_FINAL_ROUNDS, _MOST_FINAL_ROUNDS = 2, 6
_BEATEN = 2.0  # the significant lead over the base, in standard errors
_RESERVED, _LEAST_RESERVED = 6, 2  # trials reserved for the final rounds of two each


@dataclass(frozen=True)
class Knob:
    """A field of `Tuning` to search. values: sorted, without None, which means that the engine
    derives the value. coarse: those to try first. derived: the value that None yields, if known.
    """

    field: str
    values: tuple[Any, ...]
    coarse: tuple[Any, ...]
    derived: Any = None

    def turned(self, tuning: Tuning, value: Any) -> Tuning:
        """Return `tuning` with this value, or with None if the engine would derive the same."""
        return replace(tuning, **{self.field: None if value == self.derived else value})

    def turns(self, tuning: Tuning) -> list[Tuning]:
        """Return `tuning` with each value, in their order."""
        return [self.turned(tuning, value) for value in self.values]


@dataclass(frozen=True)
class SearchSpace:
    """A base and the knobs to turn from there. base: the tuning that all others are compared with;
    all derived, but for the values that must be given.
    """

    base: Tuning
    knobs: tuple[Knob, ...]


@dataclass(frozen=True)
class Measured:
    """The measurement of one trial. seconds: of each whole iteration; empty if the trial failed.
    took_s: of the whole trial, its start included.
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


class Search:
    """A search for the best tuning of a space. limit_s: seconds that all trials may take together.
    tell: called with each trial when it has ended. best: so far, also after an exception from
    `measure`; in the end the base, unless another tuning has beaten it by more than the noise.
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
        self.was_cut = False  # whether time was up before all was tried
        self._measure = measure
        self._limit_s = limit_s
        self._tell = tell
        self._runs: dict[Tuning, list[Measured]] = {}  # without those that have failed

    @property
    def spent_s(self) -> float:
        return sum(trial.measured.took_s for trial in self.trials)

    @property
    def left_s(self) -> float:
        return max(0.0, self._limit_s - self.spent_s)

    def take(self, tuning: Tuning, measured: Measured) -> None:
        """Add a trial that was measured already."""
        runs = self._runs.setdefault(tuning, [])
        if measured.failure is None:
            runs.append(measured)
        self.trials.append(TunedTrial(len(self.trials) + 1, tuning, measured))
        self._tell(self.trials[-1])

    def run(self) -> Tuning:
        """Search, and return the best."""
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
        return self.best

    @property
    def spread_s(self) -> float:
        """The spread of the best's iterations."""
        return spread_s([s for run in self._runs.get(self.best, ()) for s in run.seconds])

    @property
    def stall_share(self) -> float:
        """The share of an iteration in which the best waits."""
        runs = self._runs.get(self.best)
        return statistics.median(run.stall_share for run in runs) if runs else 0.0

    def step_s(self, tuning: Tuning) -> float:
        """Return the median seconds of an iteration over all trials; infinite if none succeeded."""
        return _step_s(self._runs.get(tuning, ()))

    @property
    def noise(self) -> float:
        """The noise of a trial's median, as a share: the standard deviation of repeats, pooled over
        all tunings.
        """
        squares = _NOISE_WEIGHT * _LEAST_NOISE**2
        degrees = _NOISE_WEIGHT
        for runs in self._runs.values():
            if len(runs) > 1:
                logs = [math.log(run.step_s) for run in runs]
                squares += statistics.variance(logs) * (len(logs) - 1)
                degrees += len(logs) - 1
        return math.sqrt(squares / degrees)

    def _refine(self, knob: Knob) -> None:
        """Move to a better neighbour until there is none. If the best leaves the knob to the engine
        and the derived value is not known, begin at the fastest that differs in this knob only.
        """
        before: Tuning | None = None
        while before != self.best and knob.values:
            before = self.best
            turns = knob.turns(before)
            at = turns.index(before if before in turns else min(turns, key=self.step_s))
            self._contest(turns[max(0, at - 1) : at + 2])

    def _contest(self, rivals: Sequence[Tuning]) -> None:
        """Measure the new rivals, then the fastest of them beside the best until its lead is clear.
        If it is better, it is the best.
        """
        new = [rival for rival in dict.fromkeys(rivals) if rival not in self._runs]
        for rival in new:
            if self._has_time(1):
                self._try(rival)
        for _ in range(_MOST_REPEATS if new else 0):
            fastest = min(new, key=self.step_s)
            if self._is_clear(fastest) or not self._has_time(2):
                break
            self._try(self.best)
            self._try(fastest)
        fastest = min(new, key=self.step_s, default=self.best)
        if self._lead(fastest) > 1:
            self.best = fastest

    def _is_clear(self, tuning: Tuning) -> bool:
        """Return whether the tuning is worse than the best by more than the noise, is better by
        more than that in two trials, or is no better in three.
        """
        lead, count = self._lead(tuning), len(self._runs.get(tuning, ()))
        return lead < -1 or (lead > 1 and count > 1) or (lead <= 0 and count > 2)

    def _lead(self, tuning: Tuning) -> float:
        """Return by how much the tuning is faster than the best, in standard errors."""
        return _lead(self._runs.get(tuning, ()), self._runs[self.best], self.noise)

    def _decide(self) -> None:
        """Measure winner and base again, by turns, and return to the base unless the winner's lead
        is significant. Only these runs count, or all if there is no time for any.
        """
        base = self.space.base
        if self.best == base:
            return
        both = self._runs[self.best], self._runs[base]
        before = [len(runs) for runs in both]
        lead = _lead(*both, self.noise)
        for number in range(_MOST_FINAL_ROUNDS):
            is_clear = not 0 < lead <= _BEATEN
            if (is_clear and number >= _LEAST_FINAL_ROUNDS) or not self._has_time(2, reserved=0):
                break
            self._try(self.best)
            self._try(base)
            lead = _lead(both[0][before[0] :], both[1][before[1] :], self.noise)
        if lead <= _BEATEN:
            self.best = base

    def _try(self, tuning: Tuning) -> None:
        self.take(tuning, self._measure(tuning))

    def _has_time(self, trials: int, reserved: int | None = None) -> bool:
        """Return whether there is time for so many trials and the reserved ones of the end."""
        if reserved is None:
            reserved = _LEAST_RESERVED if self.best == self.space.base else _RESERVED
        usual_s = statistics.median(t.measured.took_s for t in self.trials) if self.trials else 0.0
        has_time = (trials + reserved) * usual_s <= self.left_s
        self.was_cut |= not has_time
        return has_time


def spread_s(seconds: Sequence[float]) -> float:
    """Return half of the interquartile range."""
    if len(seconds) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / 2


def _step_s(runs: Sequence[Measured]) -> float:
    return statistics.median(run.step_s for run in runs) if runs else math.inf


def _lead(one: Sequence[Measured], other: Sequence[Measured], noise: float) -> float:
    """Return by how much the first tuning is faster, in standard errors of the ratio of medians."""
    if not one or not other:
        return math.inf if one else -math.inf
    doubt = noise * math.sqrt(1 / len(one) + 1 / len(other))
    return math.log(_step_s(other) / _step_s(one)) / doubt
