"""Ranks that do one thing together, such as a save, and speak of it over connections of their own.

A meeting begins when all ranks have come to it; who comes alone hears that after a deadline, and
has left no trace: the next one may be whole. What is said are small things, in turns, from one
thread of each rank. Who leaves, or dies, is missed at once by whoever listens. Nothing of it is
known to the groups that torch keeps: neither their order nor their number changes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from offload.errors import StateError
from offload.shard import (
    Members,
    Speakers,
    Worker,
    default_store,
    members_of,
    name_for,
    speakers_of,
)

_FIRST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.01
_MEETINGS: Counter[str] = Counter()  # how many there have been, by name
_LOCK = threading.Lock()


def meet(what: str, process_group: Any, deadline_s: float) -> Circle | None:
    """A meeting of the ranks of `process_group` (None: all; False: none). None where this process
    is alone. All ranks come to it in the same order.
    """
    members = members_of(process_group)
    if members is None:
        return None
    name = name_for("meeting", members.ranks)
    with _LOCK:
        key = f"{name}/{_MEETINGS[name]}"
        _arrive(default_store(), key, members.rank, len(members.ranks), what, deadline_s)
        _MEETINGS[name] += 1
    try:
        speakers = speakers_of(key, members, deadline_s)
    except RuntimeError as error:
        raise StateError(
            f"{what}: the ranks cannot be connected, or one has gone in this moment; look at what "
            f"the other ranks have said ({str(error).strip().splitlines()[0]})"
        ) from error
    return Circle(members.rank, len(members.ranks), speakers)


def _arrive(store: Any, key: str, rank: int, count: int, what: str, deadline_s: float) -> None:
    """Return when all are there. Otherwise it is as if this rank had never come."""
    until_s, nap_s = time.monotonic() + deadline_s, _FIRST_NAP_S
    store.set(f"{key}/{rank}", "here")
    if store.add(key, 1) == count:
        store.set(f"{key}/go", "go")
        return
    try:
        while not store.check([f"{key}/go"]):
            if time.monotonic() > until_s:
                raise StateError(_missing(store, key, rank, count, what, deadline_s))
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    except BaseException:
        if store.add(key, -1) + 1 < count:
            with suppress(RuntimeError):
                store.delete_key(f"{key}/{rank}")
            raise
        store.add(key, 1)  # the last one has come in this very moment


def _missing(store: Any, key: str, rank: int, count: int, what: str, deadline_s: float) -> str:
    missing = [str(n) for n in range(count) if n != rank and not store.check([f"{key}/{n}"])]
    return (
        f"{what}: rank {rank} has waited {deadline_s:g} s for rank {', '.join(missing) or '?'} of "
        f"{count}; call it on every rank, at the same point of the program"
    )


class Circle:
    """Of `count` ranks, this being `rank`. One thread speaks; any may `leave`."""

    def __init__(self, rank: int, count: int, speakers: Speakers) -> None:
        self.rank, self.count = rank, count
        self._speakers: Speakers | None = speakers
        self._why: BaseException | None = None
        self._is_waiting = False  # for others
        self._lock = threading.Lock()

    def exchange(self, value: Any, what: str, deadline_s: float) -> list[Any]:
        """What every rank has to say, by rank: anything that JSON can express. Raises `StateError`
        where one has gone, or does not come within the deadline.
        """
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        found = self.gather(data, what, deadline_s)
        return [json.loads(one.numpy().tobytes()) for one in found]

    def gather(self, mine: Tensor, what: str, deadline_s: float) -> list[Tensor]:
        """The bytes of every rank, by rank, as many as it has."""
        lengths = self._gather(torch.tensor([mine.numel()], dtype=torch.int64), what, deadline_s)
        sizes = [int(one.item()) for one in lengths]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        found = self._gather(padded, what, deadline_s)
        return [one[:size] for one, size in zip(found, sizes, strict=True)]

    def _gather(self, mine: Tensor, what: str, deadline_s: float) -> Sequence[Tensor]:
        with self._lock:
            speakers = self._speakers
            if speakers is None:
                raise self._why or StateError(f"{what}: rank {self.rank} has left")
            self._is_waiting = True
        found = [torch.empty_like(mine) for _ in range(self.count)]
        work = None
        try:
            work = speakers.gather(found, mine, deadline_s)
            self._await(work)
        except BaseException as error:
            self._why = self._why or error
            if work is not None and not work.is_completed():
                self._speakers = None
                _close_later(speakers, work, [*found, mine])
            if not isinstance(error, RuntimeError) or isinstance(error, StateError):
                raise
            raise StateError(
                f"{what}: another rank has gone, or has not come within {deadline_s:g} s; look at "
                f"what the other ranks have said ({str(error).strip().splitlines()[0]})"
            ) from error
        finally:
            with self._lock:
                self._is_waiting = False
            if self._why is not None:
                self.leave()
        return found

    def _await(self, work: Any) -> None:
        """With naps, so that signals are heard, and others can end it."""
        nap_s = _FIRST_NAP_S
        while not work.is_completed():
            if self._why is not None:
                raise self._why
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        work.wait()

    def leave(self, why: BaseException | None = None) -> None:
        """Idempotent. Who waits for us hears that we have gone. why: what this rank's own thread
        gets, and leaves by itself, if it is waiting for others now.
        """
        with self._lock:
            self._why = self._why or why or StateError(f"rank {self.rank} has left")
            speakers = None
            if not self._is_waiting:
                speakers, self._speakers = self._speakers, None
        if speakers is not None:
            speakers.close()


def _close_later(speakers: Speakers, work: Any, touched: list[Tensor]) -> None:
    """When what is under way has ended: the connections cannot be closed before."""

    def close() -> None:
        while not work.is_completed():
            time.sleep(_LONGEST_NAP_S)
        speakers.close()
        touched.clear()

    Worker("offload leaves", at_end=close).end()


class Bell:
    """One that any rank may ring and all can hear, without waiting for one another: what is asked
    of it each time is one question to the store that all ranks share. All ranks make their bells in
    the same order.
    """

    def __init__(self, members: Members) -> None:
        self._store, name = default_store(), name_for("bell", members.ranks)
        with _LOCK:
            _MEETINGS[name] += 1
        self._key, self._round = f"{name}/{_MEETINGS[name]}", 0

    @classmethod
    def of(cls, process_group: Any) -> Bell | None:
        """None where this process is alone."""
        members = members_of(process_group)
        return None if members is None else cls(members)

    def ring(self, said: Any) -> None:
        """Only the first one in a round is heard."""
        if self._store.add(f"{self._key}/{self._round}/count", 1) == 1:
            self._store.set(f"{self._key}/{self._round}", json.dumps(said))

    def heard(self) -> Any | None:
        """What was said with it in this round; None: nobody has rung."""
        key = f"{self._key}/{self._round}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def next_round(self) -> None:
        """All have heard it."""
        self._round += 1
