"""Two checkouts by turns: `python benchmarks/pairs.py ../old`. Have steps become slower?

The other checkout has an environment of its own (`make setup` there). The model is that of
bench_model.py: all of it in memory, and everything on the drive. In each round the two checkouts
follow one another, in an order that is drawn; a pair's ratio is this checkout's seconds a step by
the other's. The losses of both are compared as well: the bits do not change.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench_model import entries_of
from model_results import DISK, FEW, MANY, RESIDENT
from wrap_contest import PAUSE_S, STEPS_A_TURN, Entry, Runner, Worker


def start(entry: Entry, directory: Path) -> Runner:
    return Runner(entry, Worker(entry, directory))


def run_pairs(entry: Entry, other: Path, directory: Path, rounds: int) -> tuple[Runner, Runner]:
    """Run this checkout and the other one by turns."""
    order, runners = random.Random(rounds), []
    try:
        runners.append(start(replace(entry, name=f"{entry.name}, this"), directory))
        runners.append(start(replace(entry, name=f"{entry.name}, other", root=other), directory))
        for _ in range(rounds):
            for runner in order.sample(runners, len(runners)):
                time.sleep(PAUSE_S)
                runner.turns.append(runner.worker.run(STEPS_A_TURN))
    finally:
        for runner in runners:
            runner.worker.close()
    this, that = runners
    return this, that


def tell(name: str, this: Runner, that: Runner) -> str:
    same = [step.loss for step in this.steps] == [step.loss for step in that.steps]
    whole = this.ratios(that)
    low, median, high = statistics.quantiles(whole, n=4)
    seconds = statistics.median(this.turn_s("whole_s")), statistics.median(that.turn_s("whole_s"))
    return (
        f"{name}: {len(whole)} pairs, ratio {median:.3f} (quartiles {low:.3f} to {high:.3f}, "
        f"{min(whole):.3f} to {max(whole):.3f}); {seconds[0]:.3f} s a step, the other "
        f"{seconds[1]:.3f} s; losses {'equal' if same else 'DIFFER'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--many", action="store_true", help="2,048 tokens a step, not 128")
    parser.add_argument("--directory", type=Path, help="for what is on the drive")
    options = parser.parse_args()
    what = MANY if options.many else FEW
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for entry in entries_of(what, Path(name)):
            if entry.name in (RESIDENT, DISK):
                pair = run_pairs(entry, options.other.resolve(), Path(name), options.rounds)
                print(tell(f"{entry.name}, {what}", *pair), flush=True)


if __name__ == "__main__":
    main()
