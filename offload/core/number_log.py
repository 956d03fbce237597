"""The last rows of named numbers, in memory that does not grow as a run goes on."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from math import nan


class NumberLog:
    """8 bytes a row and name, taken when a name is first seen: whole numbers below 2**53 come back
    as they were. One thread at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._columns: dict[str, array[float]] = {}  # nan: this row has no such number
        self._count = 0  # of rows, those that are forgotten included

    def append(self, numbers: Mapping[str, float]) -> None:
        place = self._count % self._most
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [nan]) * self._most
        for name, column in self._columns.items():
            column[place] = numbers.get(name, nan)
        self._count += 1  # an interrupted row is written anew by the next

    def copy(self) -> NumberLog:
        """The log as it is now."""
        made = NumberLog(self._most)
        made._columns = {name: column[:] for name, column in self._columns.items()}
        made._count = self._count
        return made

    def __len__(self) -> int:
        return min(self._count, self._most)

    def __getitem__(self, index: int) -> dict[str, float]:
        """A row: 0 is the first that is remembered, -1 the last."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        first = self._count if index < 0 else self._count - len(self)
        place = (first + index) % self._most
        return _row(self._columns, [column[place] for column in self._columns.values()])

    def __iter__(self) -> Iterator[dict[str, float]]:
        split = self._count % self._most if self._count > self._most else 0
        names = list(self._columns)
        columns = [column[: len(self)].tolist() for column in self._columns.values()]
        rows = zip(*(column[split:] + column[:split] for column in columns), strict=True)
        return (_row(names, row) for row in rows)


def _row(names: Iterable[str], numbers: Iterable[float]) -> dict[str, float]:
    return {name: n for name, n in zip(names, numbers, strict=True) if n == n}  # not nan
