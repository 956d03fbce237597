"""Ranks: the processes that share one training, by `torch.distributed`.

`Ranks` moves bytes between them: it gathers slices to whole blocks and takes the mean of blocks in
slices. Everything happens in the order of the calls, which must be that of all ranks, in a thread
of its own, over connections of its own: what the loop does with `torch.distributed` is not in its
way. Before each act the ranks tell one another what they are about to do, so that ranks that have
parted ways end with an error that says so, and not with other bytes.

On the CPU it is made of gloo's sends and receives. Its own all-gather copies everything twice more,
and its reduce-scatter moves twice the bytes; measured in benchmarks/LOG.md.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError, OffloadError, StateError
from offload.core.host_facts import ROOT, read_text
from offload.core.log import LOG
from offload.core.node_share import settle
from offload.core.ticket import Ticket
from offload.distributed.group import (
    Connections,
    Members,
    connections_of,
    deadline_of,
    name_for,
    place_of,
)
from offload.distributed.header import DOING, EXCHANGE, FAILED, GATHER, HEADER_BYTES, REDUCE, Header
from offload.distributed.link import DeviceLink, backend_of
from offload.distributed.worker import Worker

T = TypeVar("T")
_PART_BYTES = 4 << 20  # of what one rank sends to another at a time, when sums are taken


def ranks_of(process_group: Any, deadline_s: float | None = None) -> Ranks | None:
    """The ranks to share with; None: this process is alone, or `process_group` is False. All ranks
    of the group call it. deadline_s: for every wait for others; None is the group's own.
    """
    if place_of(process_group) is None:
        return None
    limit_s = deadline_of(process_group) if deadline_s is None else deadline_s
    ranks = Ranks(dist.get_process_group_ranks(process_group), limit_s)
    here = ranks.on_this_machine()
    settle(here.index(ranks.rank), len(here), _limit_threads)
    return ranks


def _limit_threads(count: int) -> None:
    if count < kernels.num_threads():
        kernels.set_num_threads(count)


_MADE: Counter[str] = Counter()  # connections of the same ranks so far


def _connect(members: Members, deadline_s: float) -> Connections:
    name = name_for("ranks", members.ranks)
    try:
        connections = connections_of(f"{name}/{_MADE[name]}", members, deadline_s)
    except RuntimeError as error:
        raise StateError(
            f"process_group: the ranks {members.ranks} could not be connected within "
            f"{deadline_s:g} s; every rank must call wrap or prepare; look at what the others have "
            f"said ({_first_line(error)})"
        ) from error
    _MADE[name] += 1
    return connections


class Ranks:
    """This process among others. One order of calls for all of them; any thread."""

    def __init__(self, members: Sequence[int], deadline_s: float) -> None:
        self._members = list(members)
        self.rank = self._members.index(dist.get_rank())
        self.count = len(self._members)
        self.deadline_s = deadline_s
        self.sent_bytes: Counter[str] = Counter()  # by kind, what this rank has put on the network
        self._connections = _connect(Members(self.rank, self._members), deadline_s)
        self._number = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._broken: StateError | None = None
        self._unsettled: list[object] = []  # what the network may still write to, after an error
        self._scratch: list[Tensor] = []
        self._links: list[DeviceLink] = []
        self._worker = Worker("ranks", partial(_hang_up, self._connections, self._unsettled))

    @property
    def place(self) -> tuple[int, int]:
        """Rank and count."""
        return self.rank, self.count

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be asked of the others any more."""
        return self._broken is not None

    def another(self) -> Ranks:
        """The same ranks with an order of their own, for what happens beside. All call it."""
        return Ranks(self._members, self.deadline_s)

    # --- what all do together ---------------------------------------------------------------------

    def gather(
        self, whole: Tensor, own: Tensor, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[None]:
        """Fill `whole` with everybody's `own`, in the order of ranks; `own` may lie in its place
        there. after: ends when `own` has its values.
        """
        _check_bytes(whole, own, self.count, what)
        act = lambda: self._gather(_flat(whole), _flat(own))  # noqa: E731
        return self._start(GATHER, own.nbytes, what, act, after)

    def reduce_scatter(
        self, own: Tensor, whole: Tensor, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[None]:
        """Make `own` the mean of everybody's part of `whole` that is this rank's. Each is divided
        by the count, then they are added in the order of ranks; 16-bit ones in fp32, and rounded
        once.
        """
        _check_bytes(whole, own, self.count, what)
        if own.dtype != whole.dtype or not own.is_floating_point():
            raise ConfigError(
                f"{what}: expected floats of one type, got {own.dtype}, {whole.dtype}"
            )
        act = lambda: self._reduce(own.view(-1), whole.view(-1))  # noqa: E731
        return self._start(REDUCE, own.nbytes, what, act, after)

    def gather_by(
        self, act: Callable[[], T], nbytes: int, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[T]:
        """As `gather`, of so many bytes a rank, which `act` does: it is called when all ranks are
        about to do the same, in our thread, and starts a collective of a `DeviceLink`.
        """
        return self._start(GATHER, nbytes, what, self._counted("gather", nbytes, act), after)

    def reduce_by(
        self, act: Callable[[], T], nbytes: int, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[T]:
        """As `reduce_scatter`, in the same way."""
        return self._start(REDUCE, nbytes, what, self._counted("reduce", nbytes, act), after)

    def _counted(self, kind: str, nbytes: int, act: Callable[[], T]) -> Callable[[], T]:
        def act_and_count() -> T:
            try:
                result = act()
            except RuntimeError as error:
                if isinstance(error, OffloadError):
                    raise
                raise StateError(f"this rank's device could not {kind}: {error}") from error
            self.sent_bytes[kind] += (self.count - 1) * nbytes
            return result

        return act_and_count

    def link(self, device: torch.device) -> DeviceLink:
        """Collectives between the devices of all ranks, who all call it. Refused on all where one
        has none.
        """
        backend = self.by_consensus("device", lambda: backend_of(device))
        self.check_equal("device", [device.type, backend], "give all ranks devices of one kind")
        make = partial(DeviceLink, self._members, backend, device, self.deadline_s)
        link = self.by_consensus("device", make)
        with self._lock:
            self._links.append(link)
        return link

    def exchange(self, value: Any, what: str, deadline_s: float | None = None) -> list[Any]:
        """What every rank has to say, by rank: something that JSON can express."""
        data = json.dumps(value).encode()
        found: list[Any] = []

        def act(headers: Sequence[Header]) -> None:
            found.extend(self._exchange(data, [header.nbytes for header in headers]))

        self._start_with_headers(EXCHANGE, len(data), what, act, None, deadline_s).wait()
        return [json.loads(one) for one in found]

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        """Of everybody's, each in double and rounded once: the same on all ranks."""
        each = self.exchange([value.hex() for value in values], what)
        if len({len(one) for one in each}) > 1:
            lengths = [len(one) for one in each]
            raise StateError(f"{what}: expected as many numbers from each rank, got {lengths}")
        columns = zip(*([float.fromhex(text) for text in one] for one in each), strict=True)
        return [_sum(column) for column in columns]

    def check_equal(self, what: str, value: Any, remedy: str) -> None:
        """Raise `ConfigError` on all ranks where one says something else than rank 0."""
        each = self.exchange(value, what)
        for rank, one in enumerate(each):
            if one != each[0]:
                name, here, there = _first_difference(what, one, each[0])
                raise ConfigError(
                    f"{name}: rank {rank} has {_short(here)}, rank 0 has {_short(there)}; {remedy}"
                )

    def agree(self, error: BaseException | None, what: str) -> None:
        """Before something that all do: raise this rank's error, or say which rank has one."""
        each = self.exchange(None if error is None else f"{type(error).__name__}: {error}", what)
        if error is not None:
            raise error
        for rank, text in enumerate(each):
            if text is not None:
                raise StateError(f"{what}: rank {rank} cannot go on, and so no rank does: {text}")

    def by_consensus(self, what: str, act: Callable[[], T]) -> T:
        """The result of something that each rank does by itself; an error on one is one on all."""
        found: list[T] = []
        error: BaseException | None = None
        try:
            found.append(act())
        except Exception as raised:
            error = raised
        self.agree(error, what)
        return found[0]

    def on_this_machine(self) -> list[int]:
        """The ranks that share this one's machine, itself among them."""
        each = self.exchange(_machine(), "which machine they are on")
        return [rank for rank, one in enumerate(each) if one == each[self.rank]]

    def close(self) -> None:
        """Let go of the network, when everything that was asked for has ended. Idempotent."""
        with self._lock:
            if not self._is_closed and not self.is_broken:
                end = partial(_close_links, tuple(self._links))  # without a hold of ourselves
                self._worker.put(lambda: end)
            self._is_closed = True
            self._worker.end()

    # --- one act ----------------------------------------------------------------------------------

    def _start(
        self,
        kind: int,
        nbytes: int,
        what: str,
        act: Callable[[], T],
        after: Ticket[Any] | None,
    ) -> Ticket[T]:
        return self._start_with_headers(kind, nbytes, what, lambda _: act(), after, None)

    def _start_with_headers(
        self,
        kind: int,
        nbytes: int,
        what: str,
        act: Callable[[Sequence[Header]], T],
        after: Ticket[Any] | None,
        deadline_s: float | None,
    ) -> Ticket[T]:
        ticket: Ticket[T] = Ticket(f"{DOING[kind]} {what} over {self.count} ranks")
        with self._lock:
            if self._is_closed:
                ticket.fail(StateError(f"{what}: the ranks have been closed"))
                return ticket
            self._number += 1
            header = Header(kind, self._number, nbytes, Header.fitting(what))
            self._worker.put(lambda: self._run(header, act, after, deadline_s, ticket))
        return ticket

    def _run(
        self,
        header: Header,
        act: Callable[[Sequence[Header]], T],
        after: Ticket[Any] | None,
        deadline_s: float | None,
        ticket: Ticket[T],
    ) -> Callable[[], None]:
        """In the thread of ours. What it returns ends the ticket."""
        try:
            if self._broken is not None:
                raise StateError(f"{header.what}: an earlier error stands: {self._broken}")
            if after is not None:
                self._await(after, header)
            result = act(self._agree_on(header, deadline_s))
        except BaseException as error:
            return partial(ticket.fail, self._as_ours(error, header))
        return partial(ticket.finish, result)

    def _await(self, after: Ticket[Any], header: Header) -> None:
        try:
            after.wait()
        except BaseException as error:
            failed = header._replace(kind=FAILED, what=f"{header.what}: {error}")
            self._swap_headers(failed, None)  # the others need not wait for the deadline
            self._break(StateError(f"{header.what}: {error}"))
            raise

    def _agree_on(self, header: Header, deadline_s: float | None) -> list[Header]:
        headers = self._swap_headers(header, deadline_s)
        others = [(rank, one) for rank, one in enumerate(headers) if not one.matches(header)]
        if others:
            rank, one = others[0]
            raise StateError(
                f"ranks have parted ways: rank {self.rank} {header}, rank {rank} {one}; every rank "
                "must run the same layers in the same order, and call save, state_dict and the like"
            )
        return headers

    def _swap_headers(self, header: Header, deadline_s: float | None) -> list[Header]:
        found = [
            torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu") for _ in range(self.count)
        ]
        work = self._connections.gather(found, header.packed(), self.deadline_s)
        self._finish([work], found, deadline_s)
        self.sent_bytes["control"] += (self.count - 1) * HEADER_BYTES
        return [Header.of(one) for one in found]

    def _finish(
        self, works: Sequence[Any], touched: Sequence[Tensor], deadline_s: float | None = None
    ) -> None:
        limit = timedelta(seconds=deadline_s or self.deadline_s)
        try:
            for work in works:
                work.wait(limit)
        except BaseException:
            self._unsettled += [*touched, *works]
            raise

    def _as_ours(self, error: BaseException, header: Header) -> BaseException:
        if isinstance(error, RuntimeError) and not isinstance(error, OffloadError):  # of gloo's
            error = StateError(
                f"{header.what}: the ranks could not {DOING[header.kind].rstrip('s')} it: another "
                f"rank has gone, or was not there within {self.deadline_s:g} s; look at what the "
                f"other ranks have said, and start all of them again ({_first_line(error)})"
            )
        if self._broken is None and isinstance(error, StateError):
            self._break(error)
        return error

    def _break(self, error: StateError) -> None:
        """Nothing can be asked of the others any more."""
        self._broken = error
        for link in self._links:
            link.abort()

    # --- bytes ------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        """Everybody else, each rank in another order: nobody gets everything at once."""
        return [(self.rank + step) % self.count for step in range(1, self.count)]

    def _gather(self, whole: Tensor, own: Tensor) -> None:
        nbytes = own.nbytes
        parts = [whole[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.count)]
        if nbytes:
            works = [self._receive(parts[rank], rank) for rank in self._others()]
            works += [self._send(own, rank, "gather") for rank in self._others()]
            if parts[self.rank].data_ptr() != own.data_ptr():
                parts[self.rank].copy_(own)
            self._finish(works, [whole, own])

    def _reduce(self, own: Tensor, whole: Tensor) -> None:
        step = _PART_BYTES // own.element_size()
        spans = [(at, min(at + step, own.numel())) for at in range(0, own.numel(), step)]
        under_way: list[tuple[tuple[int, int], list[Tensor], list[Any]]] = []
        for turn, span in enumerate(spans):
            under_way.append(self._begin_part(own, whole, span, turn % 2))
            if len(under_way) == 2:
                self._add_part(own, *under_way.pop(0))
        for part in under_way:
            self._add_part(own, *part)

    def _begin_part(
        self, own: Tensor, whole: Tensor, span: tuple[int, int], turn: int
    ) -> tuple[tuple[int, int], list[Tensor], list[Any]]:
        """Send everybody his, and receive mine."""
        numel, (begin, end) = own.numel(), span
        places = self._places(own.dtype, end - begin, turn)
        mine = [
            whole[self.rank * numel + begin : self.rank * numel + end] if rank == self.rank else one
            for rank, one in enumerate(places)
        ]
        works = [self._receive(mine[rank], rank) for rank in self._others()]
        for rank in self._others():
            part = whole[rank * numel + begin : rank * numel + end]
            works.append(self._send(part, rank, "reduce"))
        return span, mine, works

    def _places(self, dtype: torch.dtype, numel: int, turn: int) -> list[Tensor]:
        """Memory for what the others send; made once."""
        if not self._scratch:
            nbytes = 2 * self.count * _PART_BYTES
            self._scratch = list(
                torch.empty(nbytes, dtype=torch.uint8, device="cpu").view(-1, _PART_BYTES)
            )
        some = self._scratch[turn * self.count : (turn + 1) * self.count]
        return [one[: numel * dtype.itemsize].view(dtype) for one in some]

    def _add_part(
        self, own: Tensor, span: tuple[int, int], mine: list[Tensor], works: list[Any]
    ) -> None:
        self._finish(works, [own, *mine, *self._scratch])
        total: Tensor | None = None
        for one in mine:
            share = one.float().div(self.count) if one.element_size() < 4 else one.div(self.count)
            total = share if total is None else total.add_(share)
        assert total is not None
        own[slice(*span)].copy_(total)

    def _exchange(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        most = max(1, *lengths)
        mine = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
        found = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in range(self.count)]
        self._finish([self._connections.gather(found, mine, self.deadline_s)], found)
        self.sent_bytes["control"] += (self.count - 1) * most
        return [one.numpy().tobytes()[:n] for one, n in zip(found, lengths, strict=True)]

    def _send(self, part: Tensor, rank: int, kind: str) -> Any:
        self.sent_bytes[kind] += part.nbytes
        return self._connections.send(part, rank)

    def _receive(self, part: Tensor, rank: int) -> Any:
        return self._connections.receive(part, rank)


def _hang_up(connections: Connections, unsettled: Sequence[object]) -> None:
    if not unsettled:  # to close connections is to wait for what is under way on them
        connections.close()


def _close_links(links: Sequence[DeviceLink]) -> None:
    for link in links:
        try:
            link.close()
        except Exception as error:  # nobody needs it any more
            LOG.warning("ranks: the connections between devices could not be closed: %s", error)


def _check_bytes(whole: Tensor, own: Tensor, count: int, what: str) -> None:
    for tensor in (whole, own):
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise ConfigError(f"{what}: expected contiguous host memory, got {tensor.device}")
    if whole.nbytes != count * own.nbytes:
        raise ConfigError(
            f"{what}: expected {count} slices of {own.nbytes} bytes, got {whole.nbytes} bytes"
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _machine() -> str:
    """Names the machine that this process runs on, until it is started again."""
    return f"{read_text(ROOT / 'proc/sys/kernel/random/boot_id')} {os.uname().nodename}"


def _sum(values: Sequence[float]) -> float:
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    return sum(values)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_difference(what: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Where two values differ, and what is there: in the first entry of tables that does."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**other, **one}:
            if one.get(name) != other.get(name):
                return f"{what}: {name}", one.get(name), other.get(name)
    return what, one, other


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
