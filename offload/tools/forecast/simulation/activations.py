"""Offloaded activations in virtual time: written in forward and read in backward, by uses and not
by tensors.

If there are too many in memory, the oldest are written first, as in the engine; backward needs them
in reverse order, and the next ones are prefetched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offload.storage.engine import Priority
from offload.tools.forecast.simulation.clock import Clock
from offload.tools.forecast.simulation.memory import VirtualStore, VirtualTicket

_STAYS = 3 / 4  # of the limit; the rest is for writes in flight


@dataclass(eq=False)
class _KeptActivation:
    """The activations of one use of a unit. is_away: written, or being written. ticket: of the read
    that fetches them; None: it has not begun.
    """

    nbytes: int
    is_away: bool = False
    ticket: VirtualTicket | None = None


class VirtualActivations:
    """The activations of one iteration. limit_bytes: of those in memory."""

    def __init__(self, clock: Clock, store: VirtualStore, limit_bytes: int) -> None:
        self._clock, self._store = clock, store
        self._limit_bytes = limit_bytes
        self._of_unit: dict[int, list[_KeptActivation]] = {}
        self._all: list[_KeptActivation] = []  # in the order of forward
        self._going: deque[tuple[_KeptActivation, VirtualTicket]] = deque()

    def keep(self, unit: int, nbytes: int) -> None:
        """Note that a use has made so many bytes. Begins to write the oldest if there are too many,
        and waits for writes while memory is above its limit.
        """
        kept = _KeptActivation(nbytes)
        self._of_unit.setdefault(unit, []).append(kept)
        self._all.append(kept)
        staying = sum(one.nbytes for one in self._all if not one.is_away)
        for one in self._all:
            if staying <= self._limit_bytes * _STAYS:
                break
            if not one.is_away:
                one.is_away = True
                staying -= one.nbytes
                self._going.append((one, self._move("activations", one, is_write=True)))
        while self._going and self._held_bytes > self._limit_bytes:
            with self._clock.cause("activation write"):
                self._going.popleft()[1].wait()

    @property
    def _held_bytes(self) -> int:
        while self._going and self._going[0][1].done:
            self._going.popleft()
        here = sum(one.nbytes for one in self._all if not one.is_away)
        return here + sum(one.nbytes for one, _ in self._going)

    def want(self, unit: int) -> None:
        """Fetch for backward the activations of the last use of a unit, and wait for them. Prefetch
        those that were made before them.
        """
        kept = self._of_unit.get(unit)
        if not kept:
            return
        one = kept.pop()
        at = self._all.index(one)
        if one.is_away:
            ticket = one.ticket or self._move("activations", one, is_write=False, is_wanted=True)
            with self._clock.cause("activation read"):
                ticket.wait()
        self._all.remove(one)
        before = self._all[at - 1] if at else None
        if before is not None and before.is_away and before.ticket is None:
            before.ticket = self._move("activations", before, is_write=False)

    def forget(self) -> None:
        """Drop all activations: the iteration has ended."""
        self._of_unit.clear()
        self._all.clear()

    def _move(
        self, name: str, one: _KeptActivation, is_write: bool, is_wanted: bool = False
    ) -> VirtualTicket:
        priority = Priority.WAITED_FOR if is_wanted else Priority.PREFETCH
        return self._store.start(
            name, one.nbytes, is_write, Priority.WRITE_BACK if is_write else priority
        )
