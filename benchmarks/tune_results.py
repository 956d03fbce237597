"""The table of the figures of tuner and sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model_results import result_path
from results import HERE, machine_header
from wrap_results import Demand, Middle

from offload.planning.profile import Tuning
from offload.tools.tune.search import SearchSpace
from offload.tools.tune.session import describe

MOST = 1.05  # the tuner's choice / the best of the sweep


@dataclass(frozen=True)
class Setup:
    """A set-up. delay_ms: of each disk operation."""

    name: str
    delay_ms: int
    host_bytes_a_param: float


@dataclass(frozen=True)
class Choice:
    tuned: Tuning
    derived: Tuning
    layer_bytes: int | None


@dataclass
class TuneRow:
    """The row of one set-up. seconds: of whole iterations, a median for each round of the last
    comparison.
    """

    setup: Setup
    tune_trials: int
    tune_s: float
    limit_s: float
    sweep_trials: int
    choice: Choice | None = None
    seconds: dict[Tuning, list[float]] = field(default_factory=dict)

    @staticmethod
    def fastest(seen: Mapping[Tuning, Sequence[float]], count: int) -> list[Tuning]:
        good = [tuning for tuning, seconds in seen.items() if seconds]
        return sorted(good, key=lambda t: Middle.of(seen[t]).median)[:count]

    def measure(
        self,
        tunings: Iterable[Tuning],
        run: Callable[[Tuning], Sequence[float]],
        rounds: int,
    ) -> None:
        """Measure the distinct tunings by turns; a run that gives no seconds is left out."""
        distinct = list(dict.fromkeys(tunings))
        for _ in range(rounds):
            for tuning in distinct:
                if seconds := run(tuning):
                    self.seconds.setdefault(tuning, []).append(Middle.of(seconds).median)

    def middle(self, tuning: Tuning) -> Middle:
        return Middle.of(self.seconds[tuning])

    @property
    def best(self) -> Tuning:
        """The fastest of all tunings that were measured in the end."""
        return min(self.seconds, key=lambda tuning: self.middle(tuning).median)

    @property
    def ratio(self) -> float:
        assert self.choice is not None
        return self.middle(self.choice.tuned).median / self.middle(self.best).median

    @property
    def demand(self) -> Demand:
        what = "an iteration as tuned / with the best of a sweep over the same space"
        text = f"at most {MOST:.2f}"
        return Demand(self.setup.name, what, text, f"{self.ratio:.3f}", self.ratio <= MOST)


def every_tuning(space: SearchSpace) -> list[Tuning]:
    """List every tuning of the space, the base first."""
    found = [space.base]
    for knob in space.knobs:
        found = [turned for tuning in found for turned in (tuning, *knob.turns(tuning))]
    return list(dict.fromkeys(found))


def write_tune(command: str, rows: Sequence[TuneRow]) -> Path:
    """Write `results/tune_<machine>_<yyyymm>.md`."""
    HERE.mkdir(exist_ok=True)
    path = result_path("tune")
    lines = [
        "# tune",
        "",
        *machine_header(),
        f"- command: `{command}`",
        "- seconds of whole iterations: medians of trials that ran by turns when tuner and sweep "
        "were done, in brackets the middle half",
        "- slow disk: each operation of 1 MiB is delayed by the fault engine",
        "- limit: what the drive needs for its bytes at the best rate seen, or the cores for model "
        "and update",
        "",
        "| set-up | derived, s | tuned, s | best of the sweep, s | limit, s | tuned to | best | "
        "trials of the tuner | of the sweep |",
        "|---|--:|--:|--:|--:|---|---|--:|--:|",
        *map(_row, rows),
        "",
        "| set-up | what must be shown | asked | measured | met |",
        "|---|---|--:|--:|---|",
        *(str(row.demand) for row in rows),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _row(row: TuneRow) -> str:
    choice = row.choice
    assert choice is not None
    cells = [
        row.setup.name,
        str(row.middle(choice.derived)),
        str(row.middle(choice.tuned)),
        str(row.middle(row.best)),
        f"{row.limit_s:.2f}",
        describe(choice.tuned, choice.layer_bytes),
        describe(row.best, choice.layer_bytes),
        f"{row.tune_trials} in {row.tune_s:.0f} s",
        str(row.sweep_trials),
    ]
    return f"| {' | '.join(cells)} |"
