"""A strict JSON parser for untrusted files, which checks limits before it builds any value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NoReturn

from offload.core.errors import FormatError
from offload.core.format_limits import MOST_CONTAINERS, MOST_DEPTH, MOST_DIGITS

_PIECE_BYTES = 1 << 16
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_ENDLESS = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))


def parse_json(text: bytes) -> Any:
    """Parse JSON in UTF-8, and refuse repeated keys, NaN and infinities, and numbers or nesting
    beyond the limits of the format.

    Raises `FormatError`.
    """
    try:
        _check_bounds(text)
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected JSON in UTF-8, got {error}") from error


def shown(value: object) -> str:
    """Format a value from a file for a message: in ASCII, since it may have control codes for the
    terminal, and cut to 120 characters, since it may be of any length.
    """
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def printable(text: object) -> str:
    """Format a path for a message in full, with control codes for the terminal escaped."""
    plain = str(text)
    return plain if plain.isprintable() else ascii(plain)[1:-1]


def _check_bounds(text: bytes) -> None:
    """Check depth, number of containers, and digits before the parser runs: it recurses as deep as
    the text nests, and its time to convert digits grows with the square of their count.
    """
    depth = containers = 0
    for bare, overlap in _outside_strings(text):
        if _ENDLESS.search(bare):
            raise ValueError(f"a number of more than {MOST_DIGITS} digits")
        brackets = bare[overlap:].translate(None, _NO_BRACKETS)
        if max(accumulate(map(_STEPS.__getitem__, brackets), initial=depth)) > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} lists and objects within each other")
        opened = brackets.count(b"[") + brackets.count(b"{")
        depth += 2 * opened - len(brackets)
        containers += opened
        if containers > MOST_CONTAINERS:
            raise ValueError(f"more than {MOST_CONTAINERS} lists and objects")


def _outside_strings(text: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the text without the contents of strings, in pieces, because there may be very many
    strings; with each piece the number of bytes that it repeats from the end of the piece before.
    """
    # A backslash is legal only within a string; the parser refuses any other.
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    tail, is_inside = b"", False
    for at in range(0, len(plain), _PIECE_BYTES):
        parts = plain[at : at + _PIECE_BYTES].split(b'"')
        bare = tail + b'"' * is_inside + b'"'.join(parts[is_inside::2])
        yield bare, len(tail)
        tail = bare[-MOST_DIGITS:]
        is_inside ^= len(parts) % 2 == 0


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown(twice)} twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)
