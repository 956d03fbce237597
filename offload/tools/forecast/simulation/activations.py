"""Activations and logits in virtual time: made in forward and needed in backward, by uses, not by
tensors.

Offloaded ones come from the device, and are written to the drives and read again. If there are too
many in memory, the oldest are written first, as in the engine; backward needs them in reverse
order, and the next ones are prefetched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from offload.storage.engine import Priority
from offload.tools.forecast.simulation.device import VirtualDevice
from offload.tools.forecast.simulation.memory import VirtualStore, VirtualTicket
from offload.tools.forecast.workload import BACKWARD, FORWARD, Workload

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
    """The activations and logits of one iteration. limit_bytes: of activations in host memory; 0:
    they are not offloaded.
    """

    def __init__(
        self,
        work: Workload,
        limit_bytes: int,
        store: VirtualStore | None,
        device: VirtualDevice | None,
    ) -> None:
        self._limit_bytes, self._logits_bytes = limit_bytes, work.logits_bytes
        self._store, self._device = store, device
        self._made_bytes = _made_by_uses(work)
        phases = enumerate(pairwise(use.phase for use in work.uses))
        self._turns = {n for n, both in phases if both == (FORWARD, BACKWARD)}
        self._of_unit: dict[int, list[_KeptActivation]] = {}
        self._all: list[_KeptActivation] = []  # in the order of forward
        self._going: deque[tuple[_KeptActivation, VirtualTicket]] = deque()

    def keep(self, number: int, unit: int) -> None:
        """Note that a forward use of the unit, by its number, has made its activations."""
        kept = _KeptActivation(self._made_bytes[number])
        self._of_unit.setdefault(unit, []).append(kept)
        if self._device is not None and self._limit_bytes:
            self._device.download(kept.nbytes)
        elif self._device is not None:
            self._device.memory.take(kept.nbytes, by_others=True)
        if self._store is not None and self._limit_bytes:
            self._all.append(kept)
            self._write_oldest(self._store)

    def _write_oldest(self, store: VirtualStore) -> None:
        """Begin to write the oldest if there are too many, and wait for writes while memory is
        above its limit.
        """
        staying = sum(one.nbytes for one in self._all if not one.is_away)
        for one in self._all:
            if staying <= self._limit_bytes * _STAYS:
                break
            if not one.is_away:
                one.is_away = True
                staying -= one.nbytes
                write = store.start(
                    "activations", one.nbytes, True, Priority.WRITE_BACK, "activation write"
                )
                self._going.append((one, write))
        while self._going and self._held_bytes > self._limit_bytes:
            self._going.popleft()[1].wait()

    @property
    def _held_bytes(self) -> int:
        while self._going and self._going[0][1].done:
            self._going.popleft()
        here = sum(one.nbytes for one in self._all if not one.is_away)
        return here + sum(one.nbytes for one, _ in self._going)

    def want(self, unit: int) -> None:
        """Fetch for backward the activations of the unit's latest forward use, and wait for them,
        unless an earlier backward use has taken them. On a device that keeps its activations they
        are freed.
        """
        kept = self._of_unit.get(unit)
        one = kept.pop() if kept else _KeptActivation(0)
        if self._store is not None and one in self._all:
            self._read(self._store, one)
        if self._device is not None and self._limit_bytes:
            self._device.need(self._device.upload(one.nbytes).end_s)
        elif self._device is not None:
            self._device.memory.give_back(one.nbytes, by_others=True)

    def _read(self, store: VirtualStore, one: _KeptActivation) -> None:
        """Wait until they are read, and prefetch those that were made before them."""
        at = self._all.index(one)
        if one.is_away:
            (one.ticket or self._start_read(store, one, Priority.WAITED_FOR)).wait()
        self._all.remove(one)
        before = self._all[at - 1] if at else None
        if before is not None and before.is_away and before.ticket is None:
            before.ticket = self._start_read(store, before, Priority.PREFETCH)

    def _start_read(
        self, store: VirtualStore, one: _KeptActivation, priority: Priority
    ) -> VirtualTicket:
        return store.start("activations", one.nbytes, False, priority, "activation read")

    def note_end(self, number: int) -> None:
        """Note that the use of this number has ended: the logits are device memory from the end of
        forward until backward is past the last unit.
        """
        if self._device is not None and number in self._turns:
            self._device.memory.take(self._logits_bytes, by_others=True)
        elif self._device is not None and number - 1 in self._turns:
            self._device.memory.give_back(self._logits_bytes, by_others=True)

    def forget(self) -> None:
        """Drop all activations: the iteration has ended."""
        self._of_unit.clear()
        self._all.clear()


def _made_by_uses(work: Workload) -> list[int]:
    """Divide the activations among the forward uses, in proportion to their computing time."""
    forward_s = sum(use.compute_s for use in work.uses if use.phase == FORWARD)
    share = work.activation_bytes / forward_s if forward_s else 0.0
    return [int(use.compute_s * share) if use.phase == FORWARD else 0 for use in work.uses]
