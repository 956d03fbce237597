"""Activations that leave memory in forward and come back in backward: by uses, not by tensors.

The oldest go first when there are too many, as in the engine; backward wants them in reverse, and
the next ones are fetched ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offload.storage.engine import Priority
from offload.tools.forecast.simulation.clock import Clock
from offload.tools.forecast.simulation.memory import VirtualStore, VirtualTicket

_STAYS = 3 / 4  # of the limit; the rest is for what is on its way out


@dataclass(eq=False)
class _KeptActivation:
    """What one use keeps. ticket: of its way back; None: it is not under way."""

    nbytes: int
    is_away: bool = False
    ticket: VirtualTicket | None = None


class VirtualActivations:
    """limit_bytes: of what stays in memory."""

    def __init__(self, clock: Clock, store: VirtualStore, limit_bytes: int) -> None:
        self._clock, self._store = clock, store
        self._limit_bytes = limit_bytes
        self._of_unit: dict[int, list[_KeptActivation]] = {}
        self._all: list[_KeptActivation] = []  # in the order of forward
        self._going: deque[tuple[_KeptActivation, VirtualTicket]] = deque()

    def keep(self, unit: int, nbytes: int) -> None:
        """A use has made so many."""
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
        """Backward needs what the last use of a unit has kept."""
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
        """The iteration is over."""
        self._of_unit.clear()
        self._all.clear()

    def _move(
        self, name: str, one: _KeptActivation, is_write: bool, is_wanted: bool = False
    ) -> VirtualTicket:
        priority = Priority.WAITED_FOR if is_wanted else Priority.PREFETCH
        return self._store.start(
            name, one.nbytes, is_write, Priority.WRITE_BACK if is_write else priority
        )
