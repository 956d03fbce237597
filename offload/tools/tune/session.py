"""One call of `offload tune`: the request, trials, the search over them, the table of them, and the
profile that it writes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from offload.core.config import PARAM_DTYPES, parse_size
from offload.core.errors import ConfigError
from offload.core.host_facts import read_memory
from offload.core.strict_json import printable
from offload.integrations.screen import LinePart, StatusLine, fit
from offload.planning import profile
from offload.planning.profile import Profile, Tuned, Tuning, TuningTarget
from offload.planning.trial import TrialResult
from offload.tools.tune.search import Measured, Search, TunedTrial, spread_s
from offload.tools.tune.space import Limit, make_base, make_space, parse_activations, parse_try
from offload.tools.tune.trials import Program, TrialFailed

_SLACK, _SLACK_S = 5.0, 30.0  # a trial's time limit: as many times the longest so far, plus seconds
_KNOBS_WIDTH = 46

# --- what is asked for ----------------------------------------------------------------------------

SHAPE: Final = ("layers", "hidden", "vocabulary", "heads", "intermediate")
_COUNTS: Final = (*SHAPE, "batch", "sequence")
_OTHERS: Final = ("dtype", "device", "device_memory", "host_memory")


def add_loop_options(add: Callable[..., object]) -> None:
    """Declare, by `add_argument`, the options of `offload.tools.tune.loop`, which are valid with
    MODEL only.
    """
    for name in _COUNTS:
        add(f"--{name}", type=int)
    add("--dtype", choices=PARAM_DTYPES)
    add("--device")
    add("--device-memory", metavar="SIZE")
    add("--host-memory", metavar="SIZE")
    add("--nvme", metavar="DIRECTORY", action="append", help="one or several")


@dataclass(frozen=True)
class TuneRequest:
    """The arguments of the command, checked. limit_s: of all trials together. tries: the values to
    try, by knob.
    """

    command: tuple[str, ...]
    name: str
    limit_s: float
    tries: dict[str, tuple[int, ...]]
    activations: tuple[str, ...]
    profile: Path
    picture: Path
    is_own: bool  # the profile is the machine's own

    @classmethod
    def of(cls, args: argparse.Namespace) -> TuneRequest:
        for name, least in (("minutes", 0), ("steps", 1), ("warm_up", 1)):
            value = getattr(args, name)
            if not least <= value < 1e6 or (name == "minutes" and not value):
                option = name.replace("_", "-")
                raise ConfigError(f"--{option}: expected {least or 'more than 0'}, got {value}")
        command, name = _command(args)
        is_own = args.profile is None
        path = profile.own_path() if is_own else Path(args.profile)
        _check_profile(path, is_own)
        picture = Path(args.picture) if args.picture else path.with_name(f"{path.stem}_tune.png")
        if args.picture and (not picture.parent.is_dir() or picture.is_dir()):
            raise ConfigError(
                f"--picture: expected a file in a directory that is there, got {printable(picture)}"
            )
        return cls(
            command=command,
            name=name,
            limit_s=60.0 * args.minutes,
            tries=dict(parse_try(text) for text in args.tries),
            activations=parse_activations(args.activations),
            profile=path,
            picture=picture,
            is_own=is_own,
        )


def _command(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """Return the command to run and a name for it."""
    what: list[str] = args.what
    if not what:
        raise ConfigError(
            "tune: expected a MODEL, or -- and a program with its arguments, as in `offload tune "
            "-- python train.py`"
        )
    given = [name for name in (*_COUNTS, *_OTHERS, "nvme") if getattr(args, name) is not None]
    is_program = len(what) > 1 or (os.path.isfile(what[0]) and os.access(what[0], os.X_OK))
    if is_program:
        if given:
            option = given[0].replace("_", "-")
            raise ConfigError(f"--{option}: is for a MODEL; a program has its own options")
        script = next((word for word in what if word.endswith(".py")), what[0])
        return tuple(what), Path(script).name
    for name in ("host_memory", "device_memory"):
        if name in given:
            parse_size(f"--{name.replace('_', '-')}", getattr(args, name))
    options = [
        word
        for name in given
        for value in (args.nvme if name == "nvme" else [getattr(args, name)])
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return (sys.executable, "-m", "offload.tools.tune.loop", *options, "--", what[0]), what[0]


def _check_profile(path: Path, is_own: bool) -> None:
    """Raise `ConfigError`, before any trial, if the profile at `path` is another machine's, or if
    its directory does not exist.
    """
    if path.exists():
        if not profile.load(path).is_of_this_machine:
            raise ConfigError(
                f"{printable(path)}: is the profile of another machine and stays as it is; give "
                "--profile another file, or move it away"
            )
    elif not is_own and not path.parent.is_dir():
        raise ConfigError(f"--profile: the directory {printable(path.parent)} is not there")


# --- the table ------------------------------------------------------------------------------------


def describe(tuning: Tuning, layer_bytes: int | None) -> str:
    """Format a tuning as in `depth 4, chunk 512Ki, units x2`."""
    numel, nbytes = tuning.chunk_numel, tuning.unit_bytes
    values = {
        "depth": tuning.prefetch_depth,
        "chunk": numel and _elements(numel),
        "queue": tuning.queue_depth,
        "units": nbytes and f"x{nbytes / (layer_bytes or nbytes):.3g}",
        "threads": tuning.threads,
        "activations": tuning.activations,
    }
    given = [f"{name} {value}" for name, value in values.items() if value is not None]
    return ", ".join(given) or "all derived"


def _elements(numel: int) -> str:
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if numel % factor == 0:
            return f"{numel // factor}{unit}"
    return str(numel)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class TrialTable:
    """A table of trials, printed as they end, above the status line of the one that runs."""

    def __init__(self, line: StatusLine) -> None:
        self.line = line
        self.layer_bytes: int | None = None
        self.search: Search | None = None

    def head(self) -> None:
        self.line.say(
            f"{'trial':>5}  {'knobs':<{_KNOBS_WIDTH}} {'s a step':>16}  stalls  {'best':>8}  left"
        )

    def add(self, trial: TunedTrial) -> None:
        """Print the line of a trial that has ended."""
        knobs = f"{trial.number:>5}  {describe(trial.tuning, self.layer_bytes):<{_KNOBS_WIDTH}} "
        measured = trial.measured
        if measured.failure is not None:
            self.line.say(f"{knobs} failed: {measured.failure}")
            return
        time = f"{measured.step_s:.4g} ± {spread_s(measured.seconds):.2g}"
        self.line.say(f"{knobs}{time:>16}  {measured.stall_share:>5.0%}   {self._state()}")

    def tick(self, tuning: Tuning, spent_s: float) -> None:
        """Update the line of the trial that runs."""
        knobs, state = describe(tuning, self.layer_bytes), self._state(spent_s)
        row = f"  ...  {knobs:<{_KNOBS_WIDTH}} {clock(spent_s):>16}          {state}"
        width = self.line.width
        if width is not None and len(row) > width:  # what changes first, without the columns
            times = " ".join([clock(spent_s), *state.split()])
            row = fit([LinePart(times, 0), LinePart(knobs, 1)], width)
        self.line.update(row)

    def _state(self, spent_s: float = 0.0) -> str:
        if self.search is None:
            return ""
        best_s = self.search.step_s(self.search.best)
        return f"{best_s:>8.4g}  {clock(max(0.0, self.search.left_s - spent_s))}"


# --- the call -------------------------------------------------------------------------------------


@dataclass
class TuneSession:
    """A call of the command. Main thread only."""

    program: Program
    wish: TuneRequest
    table: TrialTable
    results: dict[int, TrialResult] = field(default_factory=dict)  # by the trial's number
    search: Search = field(init=False)
    _longest_s: float = 0.0
    _started: int = 0

    def run(self) -> None:
        wish, base = self.wish, make_base(self.wish.activations)
        self.table.head()
        measured = self._trial(base, wish.limit_s)  # if it raises, nothing can be tuned
        first, cores = self.results[1], profile.this_machine()[1]
        space, notes = make_space(first, base, wish.tries, wish.activations, cores)
        self.table.layer_bytes = first.layer_bytes
        self.search = Search(space, self._measure, wish.limit_s, self.table.add)
        self.table.search = self.search
        self.search.take(base, measured)
        for note in notes:
            self.table.line.say(f"{'':>5}  {note}")
        self.search.run()

    def _measure(self, tuning: Tuning) -> Measured:
        limit_s = min(self.search.left_s, _SLACK * self._longest_s) + _SLACK_S
        begin_s = time.monotonic()
        try:
            return self._trial(tuning, limit_s)
        except TrialFailed as error:  # no room, for example: the search goes on
            return Measured((), time.monotonic() - begin_s, failure=error.reason)

    def _trial(self, tuning: Tuning, limit_s: float) -> Measured:
        """Run a trial and keep its result."""
        self._started += 1
        begin_s = time.monotonic()
        result = self.program.run(
            self._started, tuning, limit_s, lambda spent_s: self.table.tick(tuning, spent_s)
        )
        took_s = time.monotonic() - begin_s
        self._longest_s = max(self._longest_s, took_s)
        self.results[self._started] = result
        return Measured(result.seconds, took_s, result.stall_share)

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
        path, search = self.wish.profile, self.search
        if self.wish.is_own:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = profile.load(path) if path.exists() else new_profile()
        for target in self.targets:
            tuned = Tuned(
                **asdict(target),
                name=self.wish.name,
                tuning=search.best,
                step_s=search.step_s(search.best),
                spread_s=search.spread_s,
                stall_share=search.stall_share,
                limit_s=self.limit.seconds,
                date=_today(),
            )
            found = found.with_tuned(tuned)
        found.save(path)
        return path


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
