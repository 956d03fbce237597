"""Does `offload tune` end near the best of everything? `make bench ONLY=tune`, or pytest
benchmarks/bench_tune.py.

Three set-ups: a drive that is slowed down by the fault engine, the drive as it is, and a budget of
host memory near the least. On each the command tunes a loop, and an exhaustive sweep tries every
tuning of the same space once. Then the tuner's choice, the best of the sweep and what is derived
are measured again, by turns: of a sweep's many figures the lowest is also the luckiest.

OFFLOAD_BENCH_LAYERS: of the model. OFFLOAD_BENCH_TUNE_SPACE: values of the knobs, as `depth=0,2
chunk=1Mi`. OFFLOAD_BENCH_ROUNDS, OFFLOAD_BENCH_DIR as elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contest import rounds
from tune_results import Choice, Setup, TuneRow, every_tuning, write_tune

from offload.planning import profile
from offload.planning.profile import Tuning
from offload.tools.tune.search import SearchSpace
from offload.tools.tune.space import FIELDS, make_space, parse_try
from offload.tools.tune.trials import Program, TrialFailed

HERE = Path(__file__).parent
WIDTH, TOKENS = 384, 256
PARAMS_A_LAYER = 12 * WIDTH * WIDTH
# Chunks of more than 64Ki do not fit into these budgets: 1Mi is what is derived.
SPACE = "depth=0,1,2,4,8 chunk=16Ki,1Mi queue=4,16 units= threads="
WARM_UP, STEPS = 2, 3
MINUTES, TRIAL_S = 20.0, 600.0
BEST = 3  # of the sweep, that are measured again
SETUPS = (
    # All gradients, some of the state, and half of the parameters; then a tenth of them.
    Setup("slow disk", delay_ms=1, host_bytes_a_param=3.5),
    Setup("fast disk", delay_ms=0, host_bytes_a_param=3.5),
    Setup("small budget", delay_ms=0, host_bytes_a_param=2.6),
)


def layers() -> int:
    return int(os.environ.get("OFFLOAD_BENCH_LAYERS") or 8)


def tries() -> list[str]:
    """Give values for every knob, so that tuner and sweep have the same space."""
    given = dict.fromkeys(FIELDS, "")
    for text in (os.environ.get("OFFLOAD_BENCH_TUNE_SPACE") or SPACE).split():
        name, _, values = text.partition("=")
        given[name] = values
    return [f"{name}={values}" for name, values in given.items()]


def command(setup: Setup, directory: Path, *more: str) -> list[str]:
    numel = layers() * PARAMS_A_LAYER
    host_bytes = int(setup.host_bytes_a_param * numel)
    options = {
        "layers": layers(),
        "width": WIDTH,
        "tokens": TOKENS,
        "steps": 50,
        "host-memory": host_bytes,
        "nvme": directory,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(HERE / "tune_loop.py"), *words, *more]


def tune(program: list[str], path: Path) -> dict[str, Any]:
    """Run `offload tune` on the program; return the JSON that it prints."""
    options = ["--minutes", str(MINUTES), "--steps", str(STEPS), "--warm-up", str(WARM_UP)]
    options += [word for text in tries() for word in ("--try", text)]
    words = [sys.executable, "-m", "offload", "tune", "--json", "--profile", str(path), *options]
    done = subprocess.run([*words, "--", *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Sweep:
    """A series of numbered trials of one loop."""

    def __init__(self, program: list[str], directory: Path) -> None:
        self._program = Program(tuple(program), directory, WARM_UP, STEPS)
        self._count = 0
        self.space = self._space()

    def run(self, tuning: Tuning) -> tuple[float, ...]:
        """Run one trial; return the seconds of its iterations, or none if the trial failed."""
        self._count += 1
        try:
            return self._program.run(self._count, tuning, TRIAL_S, lambda spent_s: None).seconds
        except TrialFailed:
            return ()

    def _space(self) -> SearchSpace:
        """Make the tuner's search space, which follows from a first trial."""
        self._count += 1
        first = self._program.run(self._count, Tuning(), TRIAL_S, lambda spent_s: None)
        given = dict(parse_try(text) for text in tries())
        return make_space(first, Tuning(), given, (), profile.this_machine()[1])[0]


@pytest.fixture(scope="module")
def tune_table(request: pytest.FixtureRequest) -> Iterator[list[TuneRow]]:
    """Collect the rows; write them down when all set-ups are there. A session that was broken off
    leaves the last good results.
    """
    rows: list[TuneRow] = []
    yield rows
    if len(rows) == len(SETUPS):
        path = write_tune("make bench ONLY=tune", rows)
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n\n{path.read_text()}\nwritten: {path.relative_to(request.config.rootpath)}")


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_tuned_against_a_sweep(
    benchmark: Any,
    tune_table: list[TuneRow],
    directory: Path,
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFLOAD_BENCH_DELAY_MS", str(setup.delay_ms))
    program = command(setup, directory)
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as place:
        path = Path(place) / "profile.json"
        found = benchmark.pedantic(lambda: tune(program, path), rounds=1)
        best = Tuning(**found["best"])
        check_in_force([*program, "--profile", str(path), "--steps", "2"], best)
        sweep = Sweep(program, Path(place))
        seen = {tuning: sweep.run(tuning) for tuning in every_tuning(sweep.space)}
        row = TuneRow(setup, len(found["trials"]), found["spent_s"], found["limit_s"], len(seen))
        row.measure([best, *row.fastest(seen, BEST), Tuning()], sweep.run, rounds(5))
    row.choice = Choice(best, Tuning(), found["trials"][0]["result"]["layer_bytes"])
    benchmark.extra_info["ratio"] = row.ratio
    tune_table.append(row)


def check_in_force(program: list[str], best: Tuning) -> None:
    """Check that the loop, run without the tuner, takes the settings that the tuner wrote."""
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["tuned"].startswith(f"{best}; from "), told
    if best.prefetch_depth is not None:
        assert told["depth"] == best.prefetch_depth
    if best.chunk_numel is not None:
        assert told["chunk_numel"] <= best.chunk_numel  # less where the budget asks for it
