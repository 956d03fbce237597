"""Acts in flight whose results are taken in one by one, in the order in which the acts began."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from offload.core.locks import uninterrupted
from offload.core.ticket import Ticket, TicketState

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Act(Generic[T]):
    ticket: Ticket[Any]
    take_in: Callable[[], object]
    free: Callable[[], object]
    whose: T


def nothing() -> None:
    """Take in the result of an act that has put it in its place."""


class InFlight(Generic[T]):
    """The acts of one kind that are in flight. wait: waits for one. frees_failed: the memory of an
    act that has failed may be used again; otherwise some other side may still write to it. One
    thread at a time.
    """

    def __init__(
        self, wait: Callable[[Ticket[Any]], object] = Ticket.wait, frees_failed: bool = False
    ) -> None:
        self._acts: deque[_Act[T]] = deque()
        self._wait, self._frees_failed = wait, frees_failed

    def __len__(self) -> int:
        return len(self._acts)

    def add(
        self,
        ticket: Ticket[Any],
        take_in: Callable[[], object],
        free: Callable[[], object],
        whose: T,
    ) -> None:
        """Add an act. take_in: called when it has ended well. free: releases its memory, then."""
        self._acts.append(_Act(ticket, take_in, free, whose))

    @property
    def owners(self) -> list[T]:
        """Whose acts they are, from the oldest on."""
        return [act.whose for act in self._acts]

    def finish_what_has_ended(self) -> None:
        while self._acts and self._acts[0].ticket.done:
            self.finish_oldest()

    def finish(self) -> None:
        """Wait for all acts."""
        while self._acts:
            self.finish_oldest()

    @uninterrupted  # but for its wait, after which the act is the oldest still
    def finish_oldest(self) -> None:
        """Wait for the oldest act, and take its result in. Raises its error, once."""
        act = self._acts[0]
        try:
            self._wait(act.ticket)
        except BaseException:
            if act.ticket.state is TicketState.COLLECTED:  # failed, not interrupted
                self._acts.popleft()
                if self._frees_failed:
                    act.free()
            raise
        self._acts.popleft()
        try:
            act.take_in()
        finally:
            act.free()
