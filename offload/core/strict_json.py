"""A strict reader of JSON from untrusted files: limits are checked before any value is built, keys
and values against the fields of a dataclass.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

from offload.core.errors import FormatError
from offload.core.format_limits import MOST_CONTAINERS, MOST_DEPTH, MOST_DIGITS

_PIECE_BYTES = 1 << 16
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_ENDLESS = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))


def parse_json(text: bytes | bytearray) -> Any:
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


def _check_bounds(text: bytes | bytearray) -> None:
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


def _outside_strings(text: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
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


_T = TypeVar("_T")
_MOST_FLOAT = 1e300


def read_as(kind: type[_T], value: Any, where: str = "") -> _T:
    """Read `value`, the JSON of a `dataclasses.asdict`, as the dataclass `kind`.

    Its fields may be strings, bools, ints and floats from 0 on, tuples of one type, dicts with
    string keys, such dataclasses, or one of these or None. Raises `FormatError` with the place of
    the first wrong key or value.
    """
    return typing.cast(_T, _read(kind, value, where))


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):  # of one type and None
        (inner,) = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return None if value is None else _read(inner, value, where)
    if origin is tuple:
        (inner, _) = typing.get_args(kind)
        _check(isinstance(value, list), where, "a list", value)
        return tuple(_read(inner, item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is dict:
        _check(isinstance(value, dict), where, "an object", value)
        inner = typing.get_args(kind)[1]
        return {key: _read(inner, item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _read_fields(kind, value, where)  # type: ignore[arg-type]
    return _read_plain(kind, value, where)


def _read_plain(kind: type, value: Any, where: str) -> Any:
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _check(is_number and 0 <= value < _MOST_FLOAT, where, "a number from 0 on", value)
        return float(value)
    if kind is int:
        is_whole = type(value) is int and 0 <= value < 2**63
        _check(is_whole, where, "a whole number from 0 on", value)
        return value
    _check(type(value) is kind, where, {str: "a text", bool: "true or false"}[kind], value)
    return value


def _read_fields(kind: type[_T], value: Any, where: str) -> _T:
    _check(isinstance(value, dict), where, "an object", value)
    hints = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in hints:
            near = difflib.get_close_matches(key, list(hints), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise FormatError(f"{shown(prefix + key)}: no such key{hint}")
    read = {key: _read(hints[key], item, prefix + key) for key, item in value.items()}
    try:
        return kind(**read)
    except TypeError as error:  # a required key is missing
        raise FormatError(f"{where or 'the file'}: {error}") from error
    except FormatError as error:  # raised by the dataclass itself
        raise FormatError(f"{prefix}{error}") from error


def _check(is_right: bool, where: str, expected: str, got: object) -> None:
    if not is_right:
        raise FormatError(f"{where or 'the file'}: expected {expected}, got {shown(got)}")
