"""The header that each rank sends before a collective, so that ranks out of step find out."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

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
