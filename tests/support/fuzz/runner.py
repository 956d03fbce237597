"""Runs a case act by act, on plain torch and offloaded, and compares after each.

An act that the engine refuses with an error that the documents allow ends the case: it counts as
refused. `REFUSALS` has them all.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from offload.core.errors import CapacityError, OffloadError, StateError
from support.fuzz.cases import Act, Case
from support.fuzz.interrupts import interrupt_within
from support.fuzz.judge import Differs, Seen, compare, parameters_of, state_of
from support.fuzz.sides import Offloaded, Plain, Side
from support.fuzz.surroundings import Leftovers, sized, surroundings


@dataclass(frozen=True)
class Refusal:
    """An error that the documents allow. acts: those it may come from."""

    kind: type[OffloadError]
    words: str
    acts: tuple[str, ...]
    reason: str


REFUSALS = (
    Refusal(
        CapacityError,
        "the least that works is",
        ("add group",),
        "docs/notes/wrapped-optimizers.md: a group for which the budget has no room is refused, "
        "and nothing is lost",
    ),
    Refusal(
        CapacityError,
        "are less than the 2 buffers",
        ("step",),
        "docs/notes/wrapped-optimizers.md: parameters that were frozen when the optimizer was "
        "wrapped, and have gradients now, need room that its budget may not have: refused, and "
        "nothing has changed",
    ),
    Refusal(
        CapacityError,
        "no room: close\\(\\) and prepare again",
        ("load", "move"),
        "docs/notes/prepared-models.md: parameters that were frozen when the model was prepared "
        "have no room for state",
    ),
)


@dataclass
class Outcome:
    """The end of a case.

    refused: the documented refusal that ended it, if one did.
    interrupts: how many of its interrupts were reached.
    """

    case: Case
    refused: str | None = None
    interrupts: int = 0
    acts: int = 0


def run(case: Case, folder: Path) -> Outcome:
    """Run a case. Raise AssertionError if the sides differ; any error has the act in a note."""
    found = Leftovers()
    with surroundings(folder, case.loop.threads) as budget:
        outcome = _Runner(case, folder).run()
        found.check(budget, folder, outcome.interrupts > 0)
    return outcome


class _Runner:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.outcome = Outcome(case)
        self.theirs = Plain(case)
        self._folder = folder

    def run(self) -> Outcome:
        act = Act("place", place=self.case.place)
        ours: Offloaded | None = None
        try:
            folders = [self._folder / "a", self._folder / "b"]
            with sized(self.case.place):
                ours = Offloaded(self.case, folders, self._folder / "checkpoints")
            for act in self.case.acts:
                self.do(ours, act)
                self.outcome.acts += 1
        except OffloadError as error:
            self.outcome.refused = _refusal(error, act)
            if self.outcome.refused is None:
                error.add_note(f"in act {self.outcome.acts}: {act}")
                raise
        except BaseException as error:
            error.add_note(f"in act {self.outcome.acts}: {act}")
            raise
        if ours is not None:
            ours.close()
        return self.outcome

    def do(self, ours: Offloaded, act: Act) -> None:
        if act.name == "interrupt":
            self.interrupt(ours, act)
            return
        if act.name == "swap":
            self.swap(ours)
            return
        if act.name == "freeze":
            may = act.how != "thaw" or ours.may_thaw(act.number)
            self.theirs.thawable = {act.number} if may else set()
        self.both(ours, act)

    def both(self, ours: Offloaded, act: Act) -> None:
        """Do an act on both sides and compare them, also the state of the random generators.

        Both begin with the same random numbers.
        """
        before = _random_numbers()
        expected = self.theirs.do(act)
        after = _random_numbers()
        _set_random_numbers(before)
        with sized(act.place or ours.place):
            got = ours.do(act)
        compare(got, expected)
        compare(dict(_random_numbers()), dict(after))

    def swap(self, ours: Offloaded) -> None:
        """Have each side load the other's `state_dict`."""
        states = [side.optimizer.state_dict() for side in (self.theirs, ours)]
        ours.optimizer.load_state_dict(states[0])
        self.theirs.optimizer.load_state_dict(states[1])

    # --- Ctrl-C -----------------------------------------------------------------------------------

    def interrupt(self, ours: Offloaded, act: Act) -> None:
        """Interrupt one act of the offloaded side: it must not have happened, or have ended, or a
        typed error must ask for a checkpoint.
        """
        if act.how == "backward":
            self.both(ours, Act("forward", int(act.value)))
        self.both(ours, Act("save"))
        saved, path = self.theirs.saved, ours.saved
        inner = _inner(act)
        numbers = _random_numbers()
        place = self.interrupted(ours, inner, act.number)
        if place is None:  # the act ended
            _set_random_numbers(numbers)
            self.theirs.do(inner)
            return
        self.outcome.interrupts += 1
        try:
            assert path is not None
            self.resolve(ours, inner, saved, path)
        except BaseException as error:
            error.add_note(f"{act.how} was interrupted in {place}")
            raise
        self.theirs.saved, ours.saved = saved, path

    def interrupted(self, ours: Offloaded, inner: Act, instruction: int) -> str | None:
        """Do the act with Ctrl-C; return where it came, None if it did not or was swallowed."""
        moments = None
        try:
            with sized(ours.place), interrupt_within(instruction) as moments:
                ours.do(inner)
        except KeyboardInterrupt:
            return str(moments)
        return None

    def resolve(self, ours: Offloaded, inner: Act, saved: Any, path: Path) -> None:
        """Find out how an interrupted act has ended, and bring both sides to one state again."""
        for side in (ours, self.theirs):
            side.waiting.clear()
            side.model.train()
        if inner.name == "step" and ours.scaler is None and self.is_either(ours):
            return
        if inner.name == "save":  # nothing has changed
            compare(self.seen(ours), self.seen(self.theirs))
            return
        for side in (ours, self.theirs):
            side.make_scaler()  # the old one was in the middle of a step
            side.is_unscaled = False
        with sized(ours.place):
            ours.load(path)
        self.theirs.restore(saved)
        for side in (ours, self.theirs):
            side.begin_anew()

    def is_either(self, ours: Offloaded) -> bool:
        """Return whether the step has not begun or has ended: then the plain side takes it, too."""
        try:
            got = self.seen(ours)
        except StateError as error:
            if "failed halfway" not in str(error):
                raise
            return False
        try:
            compare(got, self.seen(self.theirs))
        except Differs:
            self.theirs.do(Act("step"))
            compare(got, self.seen(self.theirs))
        return True

    def seen(self, side: Side) -> Seen:
        return state_of(side.optimizer) | parameters_of(side.model)


def _inner(act: Act) -> Act:
    """Return the act that an `interrupt` interrupts."""
    if act.how in ("save", "background"):
        return Act("save", how=act.how.removeprefix("save"))
    return Act(act.how, int(act.value), "no_grad" if act.how == "evaluate" else "")


def _refusal(error: OffloadError, act: Act) -> str | None:
    for each in REFUSALS:
        is_one = isinstance(error, each.kind) and re.search(each.words, str(error))
        if is_one and act.name in each.acts:
            return f"{each.kind.__name__}, {act.name}: {each.reason}"
    return None


def _random_numbers() -> Seen:
    return {
        "torch's random numbers": torch.get_rng_state(),
        "Python's random numbers": random.getstate(),
        "numpy's random numbers": _bytes_of(numpy.random.get_state()),
    }


def _bytes_of(state: Any) -> list[Any]:
    return [part.tobytes() if isinstance(part, numpy.ndarray) else part for part in state]


def _set_random_numbers(seen: Seen) -> None:
    torch.set_rng_state(seen["torch's random numbers"])
    random.setstate(seen["Python's random numbers"])
