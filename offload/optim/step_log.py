"""The log of an optimizer's last steps: a long run keeps thousands of them, in memory of fixed
size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from offload.core.decoded import Decoded
from offload.core.number_log import NumberLog
from offload.core.step_fact import StepFact

MOST_STEPS = 4096  # that the log holds
_OWN = "number", "begin_s", "end_s"  # of the step itself, in a row
_SECONDS, _COUNTS = "s", "n"  # prefixes of all other names


class StepLog:
    """A log of steps that stores no zero seconds and no zero counts. Any thread may use it."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._rows = NumberLog(most)
        self._lock = threading.Lock()

    def append(self, step: StepFact) -> None:
        row = dict(zip(_OWN, (step.number, step.begin_s, step.end_s), strict=True))
        row |= {_SECONDS + cause: s for cause, s in step.seconds.items() if s}
        row |= {_COUNTS + name: count for name, count in step.counts.items() if count}
        with self._lock:
            self._rows.append(row)

    @property
    def last(self) -> StepFact:
        with self._lock:
            return _fact(self._rows[-1])

    def __len__(self) -> int:
        return len(self._rows)

    def so_far(self) -> Sequence[StepFact]:
        """Return the steps that the log holds now, the oldest first."""
        with self._lock:  # another thread may end a step meanwhile
            return Decoded(self._rows.copy(), _fact)


def _fact(row: dict[str, float]) -> StepFact:
    number, begin_s, end_s = (row.pop(name) for name in _OWN)
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value in row.items():
        if name[0] == _SECONDS:
            seconds[name[1:]] = value
        else:
            counts[name[1:]] = int(value)
    return StepFact(int(number), begin_s, end_s, seconds, counts)
