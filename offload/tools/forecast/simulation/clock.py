"""The virtual time of the thread that trains, by cause, and drives: a queue with a speed that says
when each request is served.

Requests are cut into pieces, as the real I/O engines cut them. A limited number of bytes is in
flight at a time, served in the order in which they were submitted; the rest waits, the most urgent
first. The speed is that of reads, of writes, or of both mixed, by what is in flight. The drives
have no clock: the caller says how far to advance.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile

from offload.core.errors import ConfigError
from offload.core.metrics import Metrics
from offload.core.timeline import DISK_READS, DISK_WRITES, OTHER, Event
from offload.planning.profile import Profile
from offload.storage.engine import DEPTH, PIECE_BYTES, Priority

_PIECES = 4  # of a large request: more would only make the simulation slower


@dataclass(frozen=True)
class Rates:
    """The rates of all drives together, bytes a second."""

    read: float
    write: float
    mixed: float  # both at once, together

    @classmethod
    def of(cls, machine: Profile, directories: int) -> Rates:
        """Compute the rates of so many of a machine's drives. Raises `ConfigError` if the profile
        does not tell them.
        """
        known = machine.disks
        whole = (
            machine.disk_read_bytes_per_s,
            machine.disk_write_bytes_per_s,
            machine.disk_mixed_bytes_per_s,
        )
        some = known[:directories] if directories < len(known) or None in whole else ()
        if some:
            each = len(some) / directories  # drives that are not known are like the others
            return cls(
                sum(disk.read_bytes_per_s for disk in some) / each,
                sum(disk.write_bytes_per_s for disk in some) / each,
                sum(disk.mixed_bytes_per_s for disk in some) / each,
            )
        read, write, mixed = whole
        if read is None or write is None or mixed is None or min(read, write, mixed) <= 0:
            raise ConfigError(
                f"profile {machine.name}: expected the speeds of its drives for reading, writing "
                f"and both, got {whole}; `offload bench DIR` measures them"
            )
        return cls(read, write, mixed)


@dataclass(eq=False)
class DriveRequest:
    """A read or a write. end_s: when it ends; None: not known yet."""

    name: str
    nbytes: int
    is_write: bool
    priority: Priority
    begin_s: float
    end_s: float | None = None
    unserved: int = field(init=False)  # bytes
    waiting: int = field(init=False)  # of them, those that are not in flight yet

    def __post_init__(self) -> None:
        self.unserved = self.waiting = self.nbytes


class Drives:
    """The drives of a machine, all as one. depth: pieces in flight at a time; None: the engine's.
    Time goes on in `advance` and `finish` only, and never back.
    """

    def __init__(self, rates: Rates, depth: int | None = None) -> None:
        self.done: list[Event] = []  # in the order of their ends
        self.busy_s = 0.0
        self._rates = rates
        self._window_bytes = (depth or DEPTH) * PIECE_BYTES
        self._at_s = 0.0  # until here everything is known
        self._order = count()
        self._queue: list[tuple[int, int, DriveRequest]] = []
        self._with: deque[tuple[DriveRequest, int]] = deque()  # pieces in flight
        self._bytes_with = {True: 0, False: 0}  # of them: of writes, and of reads
        self._head_end_s: float | None = None  # of the piece that is served; None: none is

    def submit(self, request: DriveRequest) -> DriveRequest:
        """Submit a request, which begins at a moment that `advance` has reached."""
        if not request.nbytes:
            request.end_s = request.begin_s
            return request
        self._at_s = max(self._at_s, request.begin_s)
        heapq.heappush(self._queue, (request.priority, next(self._order), request))
        self._hand_over()
        return request

    def urge(self, request: DriveRequest) -> None:
        """Serve the request before others that wait: the thread that trains waits for it now."""
        if request.waiting and request.priority > Priority.WAITED_FOR:
            request.priority = Priority.WAITED_FOR
            # The earlier entry is skipped when its turn comes.
            heapq.heappush(self._queue, (request.priority, next(self._order), request))

    @property
    def next_end_s(self) -> float | None:
        """The moment at which the piece that is served now ends; None: the drives are idle."""
        return self._head_end_s

    def advance(self, to_s: float) -> None:
        while self._head_end_s is not None and self._head_end_s <= to_s:
            self._end_piece(self._head_end_s)
        self._at_s = max(self._at_s, to_s)

    def finish(self, request: DriveRequest) -> float:
        """Advance until the request has ended, and return that moment."""
        while request.end_s is None:
            assert self._head_end_s is not None, f"{request.name}: no drive serves it"
            self._end_piece(self._head_end_s)
        return request.end_s

    def _end_piece(self, now_s: float) -> None:
        request, nbytes = self._with.popleft()
        self._bytes_with[request.is_write] -= nbytes
        self._at_s, self._head_end_s = now_s, None
        request.unserved -= nbytes
        if not request.unserved:
            request.end_s = now_s
            row = DISK_WRITES if request.is_write else DISK_READS
            self.done.append(Event(row, request.name, request.begin_s, now_s, request.nbytes))
        self._hand_over()

    def _hand_over(self) -> None:
        while self._queue and self._bytes_with[True] + self._bytes_with[False] < self._window_bytes:
            request = self._queue[0][2]
            if not request.waiting:
                heapq.heappop(self._queue)
                continue
            nbytes = min(request.waiting, max(PIECE_BYTES, -(-request.nbytes // _PIECES)))
            request.waiting -= nbytes
            self._with.append((request, nbytes))
            self._bytes_with[request.is_write] += nbytes
        if self._head_end_s is None and self._with:
            seconds = self._with[0][1] / self._rate(self._with[0][0].is_write)
            self.busy_s += seconds
            self._head_end_s = self._at_s + seconds

    def _rate(self, is_write: bool) -> float:
        if all(self._bytes_with.values()):
            return self._rates.mixed
        return self._rates.write if is_write else self._rates.read


class Clock:
    """A virtual clock that advances the drives with it. drives: None if there are none.
    memory_bytes_per_s: None: what the thread does in memory takes no time. seconds: those spent so
    far, by cause.
    """

    def __init__(self, drives: Drives | None, memory_bytes_per_s: float | None = None) -> None:
        self.now_s = 0.0
        self.drives = drives
        self._memory_bytes_per_s = memory_bytes_per_s
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

    def spend_in_memory(self, nbytes: int, cause: str) -> None:
        """Advance by reading or writing so many bytes in memory."""
        if self._memory_bytes_per_s is not None:
            with self.cause(cause):
                self.spend(nbytes / self._memory_bytes_per_s)

    def wait_until(self, moment_s: float) -> None:
        self._go_to(max(self.now_s, moment_s))

    def wait_for(self, request: DriveRequest) -> None:
        assert self.drives is not None, "who has given us a request?"
        if request.end_s is None:
            self.drives.urge(request)
        self.wait_until(self.drives.finish(request))

    def has_ended(self, request: DriveRequest) -> bool:
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
        done = self._clock.drives.done if self._clock.drives is not None else []
        return list(takewhile(lambda event: event.end_s >= begin_s, reversed(done)))

    @property
    def counts(self) -> Counter[str]:
        return self._counts
