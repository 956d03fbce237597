"""A reader of dataclasses from untrusted JSON: checks every key and value against the fields."""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import is_dataclass
from typing import Any, TypeVar

from offload.core.errors import FormatError
from offload.core.strict_json import shown

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
