"""The consensus of ranks: an error on one rank is one on all, before anything changes.

`prepare`, `wrap`, steps, saves and loads all use it. Each rank does its part and says how that went
over an `Exchange`: connections of a process group, or a side channel. If one rank has failed, all
raise: that rank its own error, the others one that names the rank. Before a collective each rank
sends a `Header`, so that ranks out of step find out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from offload.core.errors import ConfigError, OffloadError, StateError, kind_of
from offload.core.metrics import Metrics

T = TypeVar("T")
NETWORK = "network"  # the cause of seconds in which a rank waits for others
SAME = "give all ranks the same"


class Exchange(Protocol):
    """A way to exchange values between ranks."""

    told_errors: type[BaseException]  # other ranks are told of these; others end this rank at once

    def exchange(self, value: Any, what: str, deadline_s: float | None = None) -> list[Any]:
        """All-gather one value from each rank, by rank: anything that JSON can express. Blocks."""


def each_by_consensus(
    ranks: Exchange,
    what: str,
    act: Callable[[], Any],
    metrics: Metrics | None = None,
    remedy: str = "",
    deadline_s: float | None = None,
    others: type[OffloadError] | None = None,
) -> list[Any]:
    """Run `act` on every rank and return all results, by rank. A result is a value that JSON can
    express. If `act` raises on one rank, all ranks raise.

    what: the act's name in messages. metrics: get the time spent waiting for the other ranks.
    remedy: advice appended to the error where other ranks do something else meanwhile. others: the
    error of the ranks that have not failed; None: of the kind of the failed rank's. Blocks.
    """
    error: BaseException | None = None
    said: dict[str, Any] = {}
    try:
        said = {"value": act()}
    except ranks.told_errors as failed:
        error = failed
        said = {"kind": type(failed).__name__, "text": str(failed)}
    try:
        with metrics.span(NETWORK, what) if metrics is not None else nullcontext():
            each = ranks.exchange(said, what, deadline_s)
    except ranks.told_errors as lost:
        if error is None:
            if remedy and isinstance(lost, OffloadError):
                lost.args = (f"{lost}; {remedy}",)
            raise
        if isinstance(error, OffloadError) and isinstance(lost, StateError):
            error.args = (f"{error}; {lost}",)  # `error` may not name the rank it waited for
        raise error from lost
    if error is not None:
        raise error
    for rank, one in enumerate(each):
        if "kind" in one:
            kind, text = one["kind"], one["text"]
            raise (others or kind_of(kind))(
                f"{what}: rank {rank} failed, so no rank continues: {kind}: {text}"
            )
    return [one["value"] for one in each]


def by_consensus(ranks: Exchange | None, what: str, act: Callable[[], T]) -> T:
    """Run `act`, which each rank does by itself, and return this rank's result. If it raises on one
    rank, the others raise `StateError`. ranks: None if this process is alone. Blocks.
    """
    if ranks is None:
        return act()
    found: list[T] = []
    each_by_consensus(ranks, what, lambda: found.append(act()), others=StateError)
    return found[0]


def check_alike(
    what: str,
    said: Sequence[Mapping[str, Any]],
    remedy: str | Callable[[str], str] = SAME,
    kind: type[OffloadError] = ConfigError,
) -> None:
    """Raise `kind` if the facts that ranks have said, by rank, differ; name the first that does.

    remedy: advice for the message, or a function that returns it for the name of a fact.
    """
    for rank, one in enumerate(said):
        here, there = ({**said[0], **one}, said[0])
        other = [name for name in here if one.get(name, _NOTHING) != there.get(name, _NOTHING)]
        if other:
            name = other[0]
            values = f"{_short(one.get(name, _NOTHING))} and {_short(there.get(name, _NOTHING))}"
            more = f" and in {len(other) - 1} more" if len(other) > 1 else ""
            advice = remedy if isinstance(remedy, str) else remedy(name)
            raise kind(
                f"{what}: rank {rank} and rank 0 differ in {name} ({values}){more}; {advice}"
            )


_NOTHING = "not there"


def checksum_of(value: object) -> str:
    """Return a short text for a value that is too long to be told, to be compared over ranks."""
    return told_checksum(zlib.crc32(repr(value).encode()))


def told_checksum(checksum: int) -> str:
    """Return a checksum as messages show it."""
    return f"checksum {checksum:08x}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


HEADER_BYTES = 192
GATHER, REDUCE, EXCHANGE, FAILED = range(4)
DOING = ("gathers", "reduces", "exchanges", "has failed before")
_FIELDS = struct.Struct("<BIQ")  # kind, number, bytes
_TEXT_BYTES = HEADER_BYTES - _FIELDS.size


class Header(NamedTuple):
    """The announcement of a rank's next act: its kind, its number in the order of acts, the bytes
    of this rank's part, and a text for messages.
    """

    kind: int
    number: int
    nbytes: int
    what: str

    @staticmethod
    def fitting(what: str) -> str:
        """Cut a text to what a header holds; the limit is in bytes, not in letters."""
        return what.encode()[:_TEXT_BYTES].decode(errors="ignore")

    def packed(self) -> Tensor:
        packed = (
            _FIELDS.pack(self.kind, self.number, self.nbytes) + self.what.encode()[:_TEXT_BYTES]
        )
        return torch.frombuffer(bytearray(packed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def of(cls, packed: Tensor) -> Header:
        data = packed.numpy().tobytes()
        text = data[_FIELDS.size :].rstrip(b"\0").decode(errors="replace")
        kind, number, nbytes = _FIELDS.unpack_from(data)
        return cls(kind, number, nbytes, text)

    def matches(self, other: Header) -> bool:
        same = (self.kind, self.number, self.what) == (other.kind, other.number, other.what)
        return same and (self.nbytes == other.nbytes or self.kind == EXCHANGE)

    def __str__(self) -> str:
        return f"{DOING[self.kind]} {self.what} ({self.nbytes} bytes, act {self.number})"
