"""Many cases, one after the other: how they ended, and the report of those that failed."""

from __future__ import annotations

import gc
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from support.fuzz.cases import Case, to_json
from support.fuzz.runner import Outcome, run
from support.fuzz.shrink import shrink

WITHIN_S = 120.0  # for one case; enough on a busy machine, too


class Hung(AssertionError):
    """A case that did not end in time."""


@dataclass
class Failure:
    case: Case
    smaller: Case
    error: str

    def __str__(self) -> str:
        return (
            f"case {self.case.seed} fails; again with\n"
            f"  python -m support.fuzz --seed {self.case.seed} --count 1\n"
            f"and smaller with\n  python -m support.fuzz --case '{to_json(self.smaller)}'\n"
            f"{self.error}"
        )


@dataclass
class Campaign:
    """A run of many cases: their counts, and the failures."""

    folder: Path
    has_alarm: bool = True
    tries: int = 200  # to make what fails smaller
    ran: int = 0
    acts: int = 0
    interrupts: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, case: Case, shrinks: bool = True) -> Failure | None:
        """Run a case; return its failure, if it failed.

        shrinks: whether to look for a smaller case that fails the same way.
        """
        began_s = time.process_time()
        outcome = self._run(case)
        self.seconds += time.process_time() - began_s
        self.ran += 1
        if isinstance(outcome, Outcome):
            self.acts += outcome.acts
            self.interrupts += outcome.interrupts
            if outcome.refused is not None:
                self.refused[outcome.refused] += 1
            return None
        smaller = shrink(case, self._same(outcome), self.tries) if shrinks else case
        last = self._run(smaller) if shrinks else outcome
        failure = Failure(case, smaller, last if isinstance(last, str) else outcome)
        self.failures.append(failure)
        return failure

    def _same(self, error: str) -> Callable[[Case], bool]:
        kind = _kind(error)

        def fails(case: Case) -> bool:
            found = self._run(case)
            return isinstance(found, str) and _kind(found) == kind

        return fails

    def _run(self, case: Case) -> Outcome | str:
        """Run a case; return its outcome, or its error as text: the exception would hold memory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            with deadline(WITHIN_S if self.has_alarm else 0.0):
                return run(case, self.folder)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            text = "".join(traceback.format_exception(error, limit=-8))
            traceback.clear_frames(error.__traceback__)
        gc.collect()
        return text

    def summary(self) -> str:
        lines = [
            f"{self.ran} cases, {self.acts} acts, {self.interrupts} interrupts, "
            f"{len(self.failures)} failed, {sum(self.refused.values())} refused "
            f"({self.refused_share:.1%}), {1000 * self.seconds / max(1, self.ran):.0f} ms each"
        ]
        return "\n".join(lines + [f"  {count} x {what}" for what, count in self.refused.items()])

    @property
    def refused_share(self) -> float:
        return sum(self.refused.values()) / max(1, self.ran)


def _kind(error: str) -> str:
    """Return the class name of the error in a traceback's text; its notes may follow it there."""
    named = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", error, re.MULTILINE)
    return str(named[-1]) if named else ""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Hung` in the main thread if the block runs longer than this; 0: no limit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hung(
            f"not ended after {seconds:.0f} s:\n{''.join(traceback.format_stack(frame)[-6:])}"
        )

    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
