"""The last steps of an optimizer, kept small: a long run remembers thousands of them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from offload.run_file import StepFact

MOST_STEPS = 4096  # that are remembered


class _Row(NamedTuple):
    """A step. Names are those of other steps, too, and what was nothing is left out."""

    number: int
    times_s: array[float]  # begin, end, then the seconds of each cause
    causes: tuple[str, ...]
    counts: array[int]
    counters: tuple[str, ...]


class StepLog:
    """Some 500 bytes a step, where two dictionaries would take six thousand."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._rows: deque[_Row] = deque(maxlen=most)
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def append(self, step: StepFact) -> None:
        seconds = {cause: s for cause, s in step.seconds.items() if s}
        counts = {name: n for name, n in step.counts.items() if n}
        times_s = array("d", [step.begin_s, step.end_s, *seconds.values()])
        numbers = array("q", counts.values())
        row = _Row(step.number, times_s, self._same(seconds), numbers, self._same(counts))
        self._rows.append(row)

    def _same(self, named: dict[str, float] | dict[str, int]) -> tuple[str, ...]:
        names = tuple(named)
        return self._names.setdefault(names, names)

    @property
    def last(self) -> StepFact:
        return _unpacked(self._rows[-1])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StepFact]:
        """From the first that is remembered."""
        return map(_unpacked, list(self._rows))  # a step may end meanwhile, in another thread


def _unpacked(row: _Row) -> StepFact:
    begin_s, end_s, *seconds = row.times_s
    return StepFact(
        row.number,
        begin_s,
        end_s,
        dict(zip(row.causes, seconds, strict=True)),
        dict(zip(row.counters, row.counts, strict=True)),
    )
