"""Ranks: the processes that share one training, connected through `torch.distributed`.

`Ranks` moves bytes between them: it all-gathers shards to whole blocks and reduce-scatters blocks
to shards of their mean. All acts run in the order of the calls, which must be the same on all
ranks, in a thread of its own and over connections of its own: the training loop's own collectives
do not interfere. Before each act the ranks exchange headers that say what they are about to do, so
that ranks that are out of step end with an error that says so, and not with wrong bytes.

On the CPU it is built on gloo's sends and receives. Gloo's own all-gather copies everything twice
more, and its reduce-scatter moves twice the bytes; measured in benchmarks/LOG.md.
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
from offload.core.node_share import take_share
from offload.core.ticket import Ticket
from offload.distributed.consensus import (
    DOING,
    EXCHANGE,
    FAILED,
    GATHER,
    HEADER_BYTES,
    REDUCE,
    Header,
    by_consensus,
    check_alike,
)
from offload.distributed.group import (
    Connections,
    DeviceLink,
    Members,
    backend_of,
    connections_of,
    deadline_of,
    name_for,
    place_of,
)
from offload.distributed.worker import Worker

T = TypeVar("T")
_PART_BYTES = 4 << 20  # what one rank sends to another at a time in a reduce-scatter


def ranks_of(process_group: Any, deadline_s: float | None = None) -> Ranks | None:
    """Connect the ranks of a group; None: this process is alone, or `process_group` is False. All
    ranks of the group call it. It also limits the kernel threads to this rank's share of the node.

    deadline_s: for every wait for another rank; None is the group's own timeout.
    """
    if place_of(process_group) is None:
        return None
    limit_s = deadline_of(process_group) if deadline_s is None else deadline_s
    ranks = Ranks(dist.get_process_group_ranks(process_group), limit_s)
    here = ranks.on_this_machine()
    take_share(here.index(ranks.rank), len(here), _limit_threads)
    return ranks


def _limit_threads(count: int) -> None:
    if count < kernels.num_threads():
        kernels.set_num_threads(count)


_MADE: Counter[str] = Counter()  # by name: connections of the same ranks made so far


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
    """The ranks of a group, as seen by this process. All ranks make the same calls in the same
    order. Any thread may call it.
    """

    told_errors: type[BaseException] = Exception

    def __init__(self, members: Sequence[int], deadline_s: float) -> None:
        self._members = list(members)
        self.rank = self._members.index(dist.get_rank())
        self.count = len(self._members)
        self.deadline_s = deadline_s
        self.sent_bytes: Counter[str] = Counter()  # by kind: what this rank has sent
        self._connections = _connect(Members(self.rank, self._members), deadline_s)
        self._number = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._broken: StateError | None = None
        self._unsettled: list[object] = []  # held after an error: gloo may still write to them
        self._scratch: list[Tensor] = []
        self._links: list[DeviceLink] = []
        self._worker = Worker("ranks", partial(_hang_up, self._connections, self._unsettled))

    @property
    def place(self) -> tuple[int, int]:
        """This process's rank and the count of ranks."""
        return self.rank, self.count

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended all communication with the other ranks."""
        return self._broken is not None

    # --- what all do together ---------------------------------------------------------------------

    def gather(
        self, whole: Tensor, own: Tensor, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[None]:
        """All-gather host memory: fill `whole` with the `own` of all ranks, in the order of ranks.
        `own` may be this rank's part of `whole`. after: ends when `own` has its values.
        """
        _check_bytes(whole, own, self.count, what)
        act = lambda _: self._gather(_flat(whole), _flat(own))  # noqa: E731
        return self._start(GATHER, own.nbytes, what, act, after)

    def reduce_scatter(
        self, own: Tensor, whole: Tensor, what: str, after: Ticket[Any] | None = None
    ) -> Ticket[None]:
        """Reduce-scatter host memory: `own` becomes the mean over all ranks of this rank's part of
        `whole`. Each addend is divided by the count, then they are added in the order of ranks;
        16-bit ones in fp32, and rounded once.
        """
        _check_bytes(whole, own, self.count, what)
        if own.dtype != whole.dtype or not own.is_floating_point():
            raise ConfigError(
                f"{what}: expected floats of one type, got {own.dtype}, {whole.dtype}"
            )
        act = lambda _: self._reduce(own.view(-1), whole.view(-1))  # noqa: E731
        return self._start(REDUCE, own.nbytes, what, act, after)

    def on_devices(
        self,
        kind: int,
        act: Callable[[], T],
        nbytes: int,
        what: str,
        after: Ticket[Any] | None = None,
    ) -> Ticket[T]:
        """Run `act`, a collective of a `DeviceLink` with `nbytes` of each rank, in the order of
        `gather`: an all-gather (`GATHER`) or a reduce-scatter (`REDUCE`). It is called in the
        thread of `Ranks`, once all ranks have announced the same.
        """
        name = "gather" if kind == GATHER else "reduce"

        def act_and_count(_: Sequence[Header]) -> T:
            try:
                result = act()
            except RuntimeError as error:
                if isinstance(error, OffloadError):
                    raise
                raise StateError(f"this rank's device could not {name}: {error}") from error
            self.sent_bytes[name] += (self.count - 1) * nbytes
            return result

        return self._start(kind, nbytes, what, act_and_count, after)

    def link(self, device: torch.device) -> DeviceLink:
        """Connect the devices of all ranks, who all call it. Raise on all ranks if one of them has
        no backend for its device, or a device of another kind.
        """
        backend = by_consensus(self, "device", lambda: backend_of(device))
        facts = {"the kind of device": device.type, "its backend": backend}
        check_alike("device", self.exchange(facts, "device"), "give all ranks devices of one kind")
        make = partial(DeviceLink, self._members, backend, device, self.deadline_s)
        link = by_consensus(self, "device", make)
        with self._lock:
            self._links.append(link)
        return link

    def exchange(self, value: Any, what: str, deadline_s: float | None = None) -> list[Any]:
        """All-gather one value from each rank, by rank: anything that JSON can express. Blocks."""
        data = json.dumps(value).encode()
        found: list[Any] = []

        def act(headers: Sequence[Header]) -> None:
            most = max(1, *(header.nbytes for header in headers))
            mine = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
            each = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in headers]
            self._finish([self._connections.gather(each, mine, self.deadline_s)], each)
            self.sent_bytes["control"] += (self.count - 1) * most
            for one, header in zip(each, headers, strict=True):
                found.append(one.numpy().tobytes()[: header.nbytes])

        self._start(EXCHANGE, len(data), what, act, deadline_s=deadline_s).wait()
        return [json.loads(one) for one in found]

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        """Sum each of `values` over all ranks, in double and rounded once: the same result on all
        ranks. Blocks.
        """
        each = self.exchange([value.hex() for value in values], what)
        if len({len(one) for one in each}) > 1:
            lengths = [len(one) for one in each]
            raise StateError(f"{what}: expected as many numbers from each rank, got {lengths}")
        columns = zip(*([float.fromhex(text) for text in one] for one in each), strict=True)
        return [_sum(column) for column in columns]

    def on_this_machine(self) -> list[int]:
        """Return the ranks on this rank's node, itself included. All ranks call it. Blocks."""
        boot_id = read_text(ROOT / "proc/sys/kernel/random/boot_id")
        each = self.exchange(f"{boot_id} {os.uname().nodename}", "which machine they are on")
        return [rank for rank, one in enumerate(each) if one == each[self.rank]]

    def close(self) -> None:
        """Close the connections once all acts requested so far have ended. Does not wait.
        Idempotent.
        """
        with self._lock:
            if not self._is_closed and not self.is_broken:
                end = partial(_close_links, tuple(self._links))  # without a reference to `self`
                self._worker.put(lambda: end)
            self._is_closed = True
            self._worker.end()

    # --- one act ----------------------------------------------------------------------------------

    def _start(
        self,
        kind: int,
        nbytes: int,
        what: str,
        act: Callable[[Sequence[Header]], T],
        after: Ticket[Any] | None = None,
        deadline_s: float | None = None,
    ) -> Ticket[T]:
        """Queue an act; it is called with the headers of all ranks once they agree."""
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
        """Run one act, in the worker thread. Return the function that ends its ticket."""
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
            self._swap_headers(failed, None)  # so that other ranks do not wait for the deadline
            self._break(StateError(f"{header.what}: {error}"))
            raise

    def _agree_on(self, header: Header, deadline_s: float | None) -> list[Header]:
        headers = self._swap_headers(header, deadline_s)
        others = [(rank, one) for rank, one in enumerate(headers) if not one.matches(header)]
        if others:
            rank, one = others[0]
            raise StateError(
                f"ranks are out of step: rank {self.rank} {header}, rank {rank} {one}; every rank "
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
        if isinstance(error, RuntimeError) and not isinstance(error, OffloadError):  # from gloo
            error = StateError(
                f"{header.what}: the ranks could not {DOING[header.kind].rstrip('s')} it: another "
                f"rank has ended, or did not answer within {self.deadline_s:g} s; look at what the "
                f"other ranks have said, and start all of them again ({_first_line(error)})"
            )
        if self._broken is None and isinstance(error, StateError):
            self._break(error)
        return error

    def _break(self, error: StateError) -> None:
        """Refuse all later acts with this error, and abort the collectives between devices."""
        self._broken = error
        for link in self._links:
            link.abort()

    # --- bytes ------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        """List the other ranks, each rank beginning behind itself: so no rank is sent everything at
        once.
        """
        return [(self.rank + step) % self.count for step in range(1, self.count)]

    def _gather(self, whole: Tensor, own: Tensor) -> None:
        nbytes = own.nbytes
        parts = [whole[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.count)]
        if nbytes:
            works = [self._connections.receive(parts[rank], rank) for rank in self._others()]
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
        """Begin to send each rank its elements of `span`, and to receive this rank's."""
        numel, (begin, end) = own.numel(), span
        places = self._places(own.dtype, end - begin, turn)
        mine = [
            whole[self.rank * numel + begin : self.rank * numel + end] if rank == self.rank else one
            for rank, one in enumerate(places)
        ]
        works = [self._connections.receive(mine[rank], rank) for rank in self._others()]
        for rank in self._others():
            part = whole[rank * numel + begin : rank * numel + end]
            works.append(self._send(part, rank, "reduce"))
        return span, mine, works

    def _places(self, dtype: torch.dtype, numel: int, turn: int) -> list[Tensor]:
        """Return buffers for what the other ranks send; their memory is allocated once."""
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

    def _send(self, part: Tensor, rank: int, kind: str) -> Any:
        self.sent_bytes[kind] += part.nbytes
        return self._connections.send(part, rank)


def _hang_up(connections: Connections, unsettled: Sequence[object]) -> None:
    if not unsettled:  # a close waits for what is in flight on the connections
        connections.close()


def _close_links(links: Sequence[DeviceLink]) -> None:
    for link in links:
        try:
            link.close()
        except Exception as error:  # no code needs the link any more
            LOG.warning("ranks: the connections between devices could not be closed: %s", error)


def _check_bytes(whole: Tensor, own: Tensor, count: int, what: str) -> None:
    for tensor in (whole, own):
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise ConfigError(f"{what}: expected contiguous host memory, got {tensor.device}")
    if whole.nbytes != count * own.nbytes:
        raise ConfigError(
            f"{what}: expected {count} shards of {own.nbytes} bytes, got {whole.nbytes} bytes"
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _sum(values: Sequence[float]) -> float:
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    return sum(values)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
