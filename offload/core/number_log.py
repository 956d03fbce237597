"""A log of the last rows of named numbers, in memory of constant size."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from math import nan


class NumberLog:
    """A ring buffer of the last `most` rows, 8 bytes per row and name, as float64.

    A column is allocated when its name is first seen. Whole numbers below 2**53 are kept exactly.
    One thread at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._columns: dict[str, array[float]] = {}  # nan: the row has no such number
        self._count = 0  # of rows appended, overwritten ones included

    def append(self, numbers: Mapping[str, float]) -> None:
        place = self._count % self._most
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [nan]) * self._most
        for name, column in self._columns.items():
            column[place] = numbers.get(name, nan)
        self._count += 1  # last: the next row overwrites one that was interrupted

    def copy(self) -> NumberLog:
        """Return a copy that later rows do not change."""
        made = NumberLog(self._most)
        made._columns = {name: column[:] for name, column in self._columns.items()}
        made._count = self._count
        return made

    def __len__(self) -> int:
        return min(self._count, self._most)

    def __getitem__(self, index: int) -> dict[str, float]:
        """Return one row: 0 is the oldest that the log still holds, -1 the latest."""
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
