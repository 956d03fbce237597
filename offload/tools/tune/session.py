"""One call of `offload tune`: trials, the search over them, and the profile it writes."""

from __future__ import annotations

import datetime
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from offload.core.host_facts import read_memory
from offload.planning import profile
from offload.planning.profile import Profile, Tuned, Tuning, TuningTarget
from offload.planning.trial import TrialResult
from offload.tools.tune.search import Measured, Search, TuneResult
from offload.tools.tune.space import Limit, make_base, make_space
from offload.tools.tune.table import TrialTable
from offload.tools.tune.trials import Program, TrialFailed
from offload.tools.tune.wish import TuneRequest

_SLACK, _SLACK_S = 5.0, 30.0  # a trial's time limit: as many times the longest so far, plus seconds


@dataclass
class TuneSession:
    """A call of the command. Main thread only."""

    program: Program
    wish: TuneRequest
    table: TrialTable
    results: dict[int, TrialResult] = field(default_factory=dict)  # by the trial's number
    layer_bytes: int | None = None
    search: Search = field(init=False)
    _longest_s: float = 0.0
    _started: int = 0

    def run(self) -> TuneResult:
        wish, base = self.wish, make_base(self.wish.activations)
        self.table.head()
        first, took_s = self._trial(base, wish.limit_s)  # if it raises, nothing can be tuned
        space, notes = make_space(
            first, base, wish.tries, wish.activations, profile.this_machine()[1]
        )
        self.table.layer_bytes = self.layer_bytes = first.layer_bytes
        self.search = Search(space, self._measure, wish.limit_s, self.table.add)
        self.table.search = self.search
        self.search.take(base, _measured(first, took_s))
        for note in notes:
            self.table.line.say(f"{'':>5}  {note}")
        return self.search.run()

    def _measure(self, tuning: Tuning) -> Measured:
        limit_s = min(self.search.left_s, _SLACK * self._longest_s) + _SLACK_S
        begin_s = time.monotonic()
        try:
            return _measured(*self._trial(tuning, limit_s))
        except TrialFailed as error:  # no room, for example: the search goes on
            return Measured((), time.monotonic() - begin_s, failure=error.reason)

    def _trial(self, tuning: Tuning, limit_s: float) -> tuple[TrialResult, float]:
        """Run a trial; return its result and the seconds that it took."""
        self._started += 1
        begin_s = time.monotonic()
        result = self.program.run(
            self._started, tuning, limit_s, lambda spent_s: self.table.tick(tuning, spent_s)
        )
        took_s = time.monotonic() - begin_s
        self._longest_s = max(self._longest_s, took_s)
        self.results[self._started] = result
        return result, took_s

    @property
    def has_found(self) -> bool:
        """Whether the search has found a tuning better than the base."""
        return hasattr(self, "search") and self.search.best != self.search.space.base

    @property
    def limit(self) -> Limit:
        best = [
            self.results[trial.number]
            for trial in self.search.trials
            if trial.tuning == self.search.best and trial.number in self.results
        ]
        return Limit.of(best, list(self.results.values()))

    @property
    def targets(self) -> list[TuningTarget]:
        found = (target for result in self.results.values() for target in result.targets)
        return list(dict.fromkeys(found))

    def write(self) -> Path:
        """Write the best so far to the profile, for every model that the loop has opened."""
        path, finding = self.wish.profile, self.search.finding()
        if self.wish.is_own:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = profile.load(path) if path.exists() else new_profile()
        for target in self.targets:
            found = found.with_tuned(_tuned(target, self.wish.name, finding, self.limit.seconds))
        found.save(path)
        return path


def _measured(result: TrialResult, took_s: float) -> Measured:
    return Measured(result.seconds, took_s, result.stall_share)


def _tuned(target: TuningTarget, name: str, finding: TuneResult, limit_s: float) -> Tuned:
    return Tuned(
        **asdict(target),
        name=name,
        tuning=finding.best,
        step_s=finding.step_s,
        spread_s=finding.spread_s,
        stall_share=finding.stall_share,
        limit_s=limit_s,
        date=_today(),
    )


def new_profile() -> Profile:
    """Make a profile of this machine, as far as it is known without measuring it."""
    cpu, cores = profile.this_machine()
    return Profile(
        name=cpu,
        is_measured=True,
        sources=("offload tune",),
        date=_today(),
        cpu=cpu,
        cores=cores,
        memory_bytes=read_memory().total_bytes,
    )


def _today() -> str:
    return datetime.date.today().isoformat()
