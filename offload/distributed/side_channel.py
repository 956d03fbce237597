"""Side channels: connections between ranks that do one thing together, such as a save.

A rendezvous is complete when all ranks have arrived. A rank that waits in vain gets an error after
a deadline, and leaves no trace: the next rendezvous may be complete. The ranks exchange small
messages in rounds, from one thread of each rank. If a rank leaves or dies, the ranks that wait for
it find out at once. Torch's process groups do not know of it: neither their order nor their number
changes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import StateError
from offload.core.locks import acquire, nap, uninterrupted
from offload.distributed.group import (
    Connections,
    Members,
    connections_of,
    deadline_of,
    default_store,
    members_of,
    name_for,
)
from offload.distributed.worker import Worker

_FIRST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.01
_BEAT_S = 1.0  # between two heartbeats
_LEAST_BYTES_S = 20 << 20  # a second; a connection that moves fewer has stopped
_RENDEZVOUS: Counter[str] = Counter()  # by name: how many there have been
_LOCK = threading.Lock()


def open_side_channel(what: str, process_group: Any, deadline_s: float) -> SideChannel | None:
    """Hold a rendezvous of the ranks of `process_group` (None: all; False: none) and open a side
    channel between them. The result is None if this process is alone. All ranks call it, in the
    same order. Blocks up to the deadline, then raises `StateError`.
    """
    members = members_of(process_group)
    if members is None:
        return None
    name, limit_s = name_for("meeting", members.ranks), deadline_of(process_group)
    deadline_s, side_channel = min(deadline_s, limit_s), None
    try:
        with uninterrupted:
            with _LOCK:
                key = f"{name}/{_RENDEZVOUS[name]}"
                count = len(members.ranks)
                late = _arrive(default_store(), key, members.rank, count, what, deadline_s)
                _RENDEZVOUS[name] += 1
            side_channel = SideChannel(
                members.rank, count, _connect(key, members, what, deadline_s), limit_s
            )
            if late is not None:
                raise late
    except BaseException as error:
        if (
            side_channel is not None
        ):  # Ctrl-C; the others are connected, and find out at once that this rank has left
            side_channel.leave(error)
        raise
    return side_channel


@uninterrupted  # except during its naps
def _arrive(
    store: Any, key: str, rank: int, count: int, what: str, deadline_s: float
) -> BaseException | None:
    """Wait until all ranks have arrived. On an error (the deadline, an interruption) undo this
    rank's arrival and raise it. But if the last rank arrives in that very moment, the others go on
    to connect to this one: then go on, too, and return an interruption instead of raising it.
    """
    until_s, nap_s = time.monotonic() + deadline_s, _FIRST_NAP_S
    store.set(f"{key}/{rank}", "here")
    if store.add(key, 1) == count:
        store.set(f"{key}/go", "go")
        return None
    try:
        while not store.check([f"{key}/go"]):
            if time.monotonic() > until_s:
                raise StateError(_missing(store, key, rank, count, what, deadline_s))
            nap(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    except BaseException as error:
        if store.add(key, -1) + 1 < count:
            with suppress(RuntimeError):
                store.delete_key(f"{key}/{rank}")
            raise
        store.add(key, 1)  # the last rank has arrived in this very moment
        return None if isinstance(error, StateError) else error
    return None


def _connect(key: str, members: Members, what: str, deadline_s: float) -> Connections:
    try:
        return connections_of(key, members, deadline_s)
    except RuntimeError as error:
        raise StateError(
            f"{what}: the ranks cannot be connected, or one has just ended; look at what "
            f"the other ranks have said ({str(error).strip().splitlines()[0]})"
        ) from error


def _missing(store: Any, key: str, rank: int, count: int, what: str, deadline_s: float) -> str:
    missing = [str(n) for n in range(count) if n != rank and not store.check([f"{key}/{n}"])]
    return (
        f"{what}: rank {rank} has waited {deadline_s:g} s for rank {', '.join(missing) or '?'} of "
        f"{count}; call it on every rank, at the same point of the program"
    )


class SideChannel:
    """A side channel between `count` ranks, of which this process is `rank`. One thread uses it at
    a time; any thread may `leave`.

    While a rank prepares its next message, a thread of the channel sends heartbeats to the others.
    So a process that was stopped, or hangs as a whole, is reported by its rank after `limit_s`,
    however long the others take for their work.
    """

    def __init__(self, rank: int, count: int, connections: Connections, limit_s: float) -> None:
        self.rank, self.count = rank, count
        self._connections, self._limit_s = connections, limit_s
        self._why: BaseException | None = None
        self._is_over = False
        self._talk: _MessageRound | None = None
        self._lock = threading.Lock()
        self._thread = Worker("offload speaks", at_end=connections.close)

    def begin(self, what: str) -> None:
        """Begin a round: send heartbeats from now on, until `exchange` or `gather` sends this
        rank's message.
        """
        with self._lock:
            if self._is_over:
                raise self._why or StateError(f"{what}: rank {self.rank} has left")
            talk = self._talk = _MessageRound(what)
            self._thread.put(lambda: self._converse(talk))

    def exchange(self, value: Any) -> list[Any]:
        """All-gather one value from each rank, by rank: anything that JSON can express. Blocks.
        Raises `StateError` if a rank has left or died, or sends no heartbeat for too long.
        """
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(one.numpy().tobytes()) for one in self.gather(data)]

    def gather(self, mine: Tensor) -> list[Tensor]:
        """All-gather the bytes of every rank, by rank; their sizes may differ. Blocks, and raises
        as `exchange` does.
        """
        talk = self._talk
        assert talk is not None, "begin comes first"
        talk.say(mine)
        nap_s = _FIRST_NAP_S
        try:
            while talk.found is None:
                if talk.error is not None or self._why is not None:
                    raise self._why or talk.error  # type: ignore[misc]
                nap(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        except BaseException as error:
            self.leave(error)
            raise
        return talk.found

    def leave(self, why: BaseException | None = None) -> None:
        """Leave the channel; ranks that wait for this one get an error. Idempotent. Any thread;
        does not wait. why: the error that this rank's own thread gets if it waits for the others
        now, or uses the channel later.
        """
        with self._lock:
            self._why = self._why or why or StateError(f"rank {self.rank} has left")
            self._is_over = True
            if self._talk is not None:
                self._talk.end()
        self._thread.end()  # closes the connections when nothing is in flight on them

    # --- in the thread ----------------------------------------------------------------------------

    def _converse(self, talk: _MessageRound) -> Callable[[], None]:
        try:
            sizes = self._say_sizes(talk)
            if sizes is not None:
                assert talk.mine is not None
                parts = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
                parts[self.rank] = talk.mine
                self._swap(talk.what, talk.mine, parts)
                talk.found = parts
        except StateError as error:
            talk.error = error
        except BaseException as error:  # from the connections
            talk.error = StateError(
                f"{talk.what}: another rank has ended; see the output of the other ranks, and "
                f"start all of them again ({str(error).strip().splitlines()[:1]})"
            )
            talk.error.__cause__ = error
        return lambda: None

    def _say_sizes(self, talk: _MessageRound) -> list[int] | None:
        """Exchange the sizes of the messages, in bytes by rank. Until every rank has its message,
        the exchange is repeated with -1 for a rank that has none yet, as a heartbeat. None: this
        rank has left.
        """
        while not talk.is_over:
            talk.await_news(min(_BEAT_S, self._limit_s / 4))
            mine = -1 if talk.mine is None else talk.mine.numel()
            heads = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.count)]
            heads[self.rank] = torch.tensor([mine], dtype=torch.int64, device="cpu")
            self._swap(talk.what, heads[self.rank], heads)
            sizes = [int(head.item()) for head in heads]
            if min(sizes) >= 0:
                return sizes
        return None

    def _swap(self, what: str, mine: Tensor, parts: Sequence[Tensor]) -> None:
        """Send `mine` to all other ranks, and receive theirs into `parts`. It uses sends and
        receives between pairs of ranks, so that an error can name the rank that did not send.
        """
        others = [rank for rank in range(self.count) if rank != self.rank]
        coming = {r: self._connections.receive(parts[r], r) for r in others if parts[r].numel()}
        going = [self._connections.send(mine, rank) for rank in others if mine.numel()]
        most = max((part.nbytes for part in parts), default=0)
        limit = timedelta(seconds=self._limit_s + most / _LEAST_BYTES_S)
        for rank, work in coming.items():
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise StateError(
                    f"{what}: rank {rank} has ended, or did not answer within "
                    f"{limit.total_seconds():g} s (is its process stopped?); look at what it and "
                    f"the other ranks have said, and start all of them again "
                    f"({str(error).strip().splitlines()[0]})"
                ) from error
        for work in going:
            work.wait(limit)


class _MessageRound:
    """A round of messages, one from each rank."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.mine: Tensor | None = None  # None: this rank's message is not ready yet
        self.found: list[Tensor] | None = None
        self.error: BaseException | None = None
        self.is_over = False  # this rank has left and does not wait for the result any more
        self._news = threading.Lock()  # an event: released once there is news
        acquire(self._news, 0.0)

    def say(self, mine: Tensor) -> None:
        self.mine = mine
        self._tell()

    def end(self) -> None:
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        with suppress(RuntimeError):  # it was released already
            self._news.release()

    def await_news(self, timeout_s: float) -> None:
        """Wait until there is a message to send, the round is over, or the timeout has passed."""
        if self.mine is None and not self.is_over:
            acquire(self._news, timeout_s)


class SharedFlag:
    """A flag that any rank may set and all can read, without waiting for one another: a read that
    finds it unset is one request to the store that all ranks share. All ranks make their flags in
    the same order.
    """

    def __init__(self, members: Members) -> None:
        self._store, name = default_store(), name_for("flag", members.ranks)
        with _LOCK:
            _RENDEZVOUS[name] += 1
        self._key, self._round = f"{name}/{_RENDEZVOUS[name]}", 0

    @classmethod
    def of(cls, process_group: Any) -> SharedFlag | None:
        """Make the flag of a process group's ranks; None if this process is alone."""
        members = members_of(process_group)
        return None if members is None else cls(members)

    def ring(self, said: Any) -> None:
        """Set the flag with a value that JSON can express. Only the first call in a round counts,
        over all ranks.
        """
        if self._store.add(f"{self._key}/{self._round}/count", 1) == 1:
            self._store.set(f"{self._key}/{self._round}", json.dumps(said))

    def heard(self) -> Any | None:
        """Return the value that the flag was set with in this round; None: it is not set."""
        key = f"{self._key}/{self._round}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def next_round(self) -> None:
        """Begin a new round with an unset flag, once all ranks have read the value."""
        self._round += 1
