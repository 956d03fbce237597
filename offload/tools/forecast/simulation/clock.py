"""The virtual time of the thread that trains, by cause, and what the drives do meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

from offload.core.metrics import Metrics
from offload.core.step_fact import OTHER
from offload.core.timeline import DISK_READS, DISK_WRITES, Event
from offload.tools.forecast.simulation.drives import DriveRequest, Drives


class Clock:
    """A virtual clock that advances the drives with it. drives: None if there are none. seconds:
    those spent so far, by cause.
    """

    def __init__(self, drives: Drives | None) -> None:
        self.now_s = 0.0
        self.drives = drives
        self.seconds: dict[str, float] = {}
        self._within: list[str] = []

    @contextmanager
    def cause(self, name: str) -> Iterator[None]:
        """Count the time that the block spends for this cause, less that of causes inside it."""
        self._within.append(name)
        try:
            yield
        finally:
            self._within.pop()

    def spend(self, seconds: float, beside_disk: float = 1.0) -> None:
        """Advance by work that takes so many seconds while the drives are idle. beside_disk: its
        speed while the drives work, as a share.
        """
        left_s = seconds
        while True:
            end_s = self.drives.next_end_s if self.drives is not None else None
            needed_s = left_s if end_s is None else left_s / beside_disk
            if end_s is None or beside_disk == 1.0 or self.now_s + needed_s <= end_s:
                self._go_to(self.now_s + needed_s)
                return
            left_s = max(0.0, left_s - (end_s - self.now_s) * beside_disk)
            self._go_to(end_s)

    def wait_until(self, moment_s: float) -> None:
        self._go_to(max(self.now_s, moment_s))

    def wait_for(self, request: DriveRequest) -> None:
        assert self.drives is not None, "who has given us a request?"
        self.drives.advance(self.now_s)
        if request.end_s is None:
            self.drives.urge(request)
        self._go_to(max(self.now_s, self.drives.finish(request)))

    def has_ended(self, request: DriveRequest) -> bool:
        if request.end_s is None and self.drives is not None:
            self.drives.advance(self.now_s)
        return request.end_s is not None and request.end_s <= self.now_s

    def _go_to(self, moment_s: float) -> None:
        cause = self._within[-1] if self._within else OTHER
        self.seconds[cause] = self.seconds.get(cause, 0.0) + moment_s - self.now_s
        self.now_s = moment_s
        if self.drives is not None:
            self.drives.advance(moment_s)


class VirtualMetrics(Metrics):
    """The engine's metrics with the seconds of a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def span(self, cause: str, what: str = "") -> object:  # type: ignore[override]
        return self._clock.cause(cause)

    def event(self, event: Event) -> None:
        """Drop the event: no timeline is drawn."""

    def events_since(self, begin_s: float) -> list[Event]:
        """Return what the drives have completed since that moment, the latest first."""
        drives = self._clock.drives
        latest = reversed(drives.done if drives is not None else [])
        return [_event(one) for one in takewhile(lambda one: _end_s(one) >= begin_s, latest)]

    @property
    def counts(self) -> Counter[str]:
        return self._counts


def _event(request: DriveRequest) -> Event:
    row = DISK_WRITES if request.is_write else DISK_READS
    return Event(row, request.name, request.begin_s, _end_s(request), request.nbytes)


def _end_s(request: DriveRequest) -> float:
    assert request.end_s is not None, "it is done"
    return request.end_s
