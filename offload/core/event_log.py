"""A log of the last events of a run, in memory of constant size."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from offload.core.timeline import Event

_MOST_TEXTS = 1024  # shared texts; those with the number of a step in them never recur


class EventLog:
    """A ring buffer of the last `most` events: columns that are allocated at the start, and texts
    that events with the same text share. One thread at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0  # of events appended, overwritten ones included
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

    def __getitem__(self, index: int) -> Event:
        """Return one event: 0 is the oldest that the log still holds, -1 the latest."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        first = self._count if index < 0 else self._count - len(self)
        return self._at(first + index)

    def __len__(self) -> int:
        return min(self._count, self._most)

    def __iter__(self) -> Iterator[Event]:
        return map(self._at, range(self._count - len(self), self._count))

    def __reversed__(self) -> Iterator[Event]:
        return map(self._at, range(self._count - 1, self._count - len(self) - 1, -1))

    def _at(self, number: int) -> Event:
        place = number % self._most
        begin_s, end_s = self._times_s[2 * place : 2 * place + 2]
        return Event(self._rows[place], self._names[place], begin_s, end_s, self._nbytes[place])
