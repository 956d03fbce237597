"""Logs of the last rows or events of a run, in memory of constant size, and a lazy view of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import Generic, TypeVar, overload

from offload.core.timeline import Event

_MOST_TEXTS = 1024  # shared texts; those with the number of a step in them never recur
R = TypeVar("R")
T = TypeVar("T")


class RingLog(Generic[R]):
    """A ring buffer of the last `most` items. One thread at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0  # of items appended, overwritten ones included

    def _at(self, number: int) -> R:
        """Return an item by its number among all that were appended."""
        raise NotImplementedError

    def __len__(self) -> int:
        return min(self._count, self._most)

    def __getitem__(self, index: int) -> R:
        """Return one item: 0 is the oldest that the log still holds, -1 the latest."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._at((self._count if index < 0 else self._count - len(self)) + index)

    def __iter__(self) -> Iterator[R]:
        return map(self._at, range(self._count - len(self), self._count))

    def __reversed__(self) -> Iterator[R]:
        return map(self._at, range(self._count - 1, self._count - len(self) - 1, -1))


class NumberLog(RingLog[dict[str, float]]):
    """A log of rows of named numbers, 8 bytes per row and name, as float64.

    A column is allocated when its name is first seen. Whole numbers below 2**53 are kept exactly.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._columns: dict[str, array[float]] = {}  # nan: the row has no such number

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

    def _at(self, number: int) -> dict[str, float]:
        place = number % self._most
        return _row(self._columns, [column[place] for column in self._columns.values()])

    def __iter__(self) -> Iterator[dict[str, float]]:
        split = self._count % self._most if self._count > self._most else 0
        names = list(self._columns)
        columns = [column[: len(self)].tolist() for column in self._columns.values()]
        rows = zip(*(column[split:] + column[:split] for column in columns), strict=True)
        return (_row(names, row) for row in rows)


class EventLog(RingLog[Event]):
    """A log of events: columns that are allocated at the start, and texts that events with the same
    text share.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._rows = [""] * most
        self._names = [""] * most
        self._times_s = array("d", [0.0]) * (2 * most)  # begin and end of each event in turn
        self._nbytes = array("q", [0]) * most
        # Not `sys.intern`: its table, which all modules share, grows by megabytes from texts that
        # are made and freed all the time.
        self._texts: dict[str, str] = {}

    def append(self, event: Event) -> None:
        """Append an event; it overwrites the oldest when the log is full."""
        place = self._count % self._most
        self._rows[place] = self._shared(event.row)
        self._names[place] = self._shared(event.name)
        self._times_s[2 * place] = event.begin_s
        self._times_s[2 * place + 1] = event.end_s
        self._nbytes[place] = event.nbytes
        self._count += 1  # last: the next event overwrites one that was interrupted

    def _shared(self, text: str) -> str:
        if len(self._texts) >= _MOST_TEXTS:
            self._texts.clear()
        return self._texts.setdefault(text, text)

    def copy(self) -> EventLog:
        """Return a copy that later events do not change."""
        made = EventLog(0)
        made._most, made._count, made._texts = self._most, self._count, {}
        made._rows, made._names = self._rows[:], self._names[:]
        made._times_s, made._nbytes = self._times_s[:], self._nbytes[:]
        return made

    def _at(self, number: int) -> Event:
        place = number % self._most
        begin_s, end_s = self._times_s[2 * place : 2 * place + 2]
        return Event(self._rows[place], self._names[place], begin_s, end_s, self._nbytes[place])


class Decoded(Sequence[T], Generic[R, T]):
    """A lazy sequence of the items that `decode` makes of `rows`, which may not change any more.

    So a report of a long run, which few users read to the end, takes no more memory than one of a
    short run.
    """

    def __init__(self, rows: RingLog[R], decode: Callable[[R], T]) -> None:
        self._rows = rows
        self._decode = decode

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        return map(self._decode, self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._decode(self._rows[index])

    def __eq__(self, other: object) -> bool:
        """Compare item by item, as lists do."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _row(names: Iterable[str], numbers: Iterable[float]) -> dict[str, float]:
    return {name: n for name, n in zip(names, numbers, strict=True) if n == n}  # not nan
