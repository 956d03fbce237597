"""Trees of plain values as JSON, and back: everything in a checkpoint that is not a tensor.

None, True and False, texts, finite floats, integers of 64 bits and lists are written as JSON has
them. Every other value is an object with one key, which names its kind:

    {"tuple": [...]}  {"dict": {text: value, ...}}  {"items": [[key, value], ...]}: a dict with
    other keys  {"ordered": ...}, {"counter": ...}: an OrderedDict or Counter, as the pairs of items
    {"bytes": base64}  {"int": "-0x..."}: a longer integer  {"float": 16 hex digits}: the bits of an
    infinity or NaN  {"text": hex of UTF-8}: with lone surrogates  {"tensor": name}

Subclasses of these types are decoded as the type itself: nothing in a file names a class.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NoReturn

from offload.core.errors import ConfigError, FormatError
from offload.core.format_limits import MOST_INT_BYTES, MOST_TREE_DEPTH, MOST_TREE_NODES
from offload.core.strict_json import shown

_LEAST_PLAIN, _MOST_PLAIN = -(1 << 63), (1 << 63) - 1
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_HEX_INT: Final = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})*")

Put = Callable[[Any], "str | None"]
Get = Callable[[str], Any]


def encode(tree: Any, put: Put, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """Encode the tree as JSON values. put: called with each leaf that is no plain value; it saves
    the leaf and returns its name, or None if it cannot, and a `ConfigError` names the leaf then.
    convert: called with every value in the tree, and returns what is encoded in its place.
    """
    return _Encoder(put, convert).encode(tree, (), MOST_TREE_DEPTH)


def decode(tree: Any, get: Get) -> Any:
    """Decode a tree that `encode` returned. get: returns the tensor of a name; called once for
    each, so that what was one object is one again. Raises `FormatError`.
    """
    return _Decoder(get).decode(tree, MOST_TREE_DEPTH)


class _Encoder:
    def __init__(self, put: Put, convert: Callable[[Any], Any]) -> None:
        self._put, self._convert = put, convert
        self._left = MOST_TREE_NODES

    def encode(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            self._refuse(path, f"expected a tree of at most {MOST_TREE_NODES} values; use a tensor")
        value = self._convert(value)
        if value is None or isinstance(value, bool | str | int | float | bytes):
            return self._encode_plain(value, path)
        if isinstance(value, dict | list | tuple):
            if depth == 0:
                self._refuse(
                    path,
                    f"expected at most {MOST_TREE_DEPTH} dicts and lists within each other; does "
                    "it hold itself?",
                )
            return self._encode_many(value, path, depth - 1)
        name = self._put(value)
        if name is None:
            self._refuse(
                path,
                "expected None, a bool, number, text, bytes, list, tuple, dict or tensor, got "
                f"{type(value).__module__}.{type(value).__qualname__}; leave it out or turn it "
                "into one of these",
            )
        return {"tensor": name}

    def _encode_plain(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            text = str.__str__(value)
            if _SURROGATE.search(text):
                return {"text": text.encode("utf-8", "surrogatepass").hex()}
            return text
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, float):
            number = float(value)
            return number if math.isfinite(number) else {"float": struct.pack(">d", number).hex()}
        whole = int(value)
        if _LEAST_PLAIN <= whole <= _MOST_PLAIN:
            return whole
        if whole.bit_length() > 8 * MOST_INT_BYTES:
            self._refuse(path, f"expected a whole number of at most {MOST_INT_BYTES} bytes")
        return {"int": hex(whole)}

    def _encode_many(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        if isinstance(value, list):
            return [self.encode(item, (*path, i), depth) for i, item in enumerate(value)]
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                self._refuse(path, "expected a plain tuple, got one with names; use a dict")
            items = [self.encode(item, (*path, i), depth) for i, item in enumerate(value)]
            return {"tuple": items}
        kind = _KIND_OF.get(type(value), "dict")
        if kind == "dict":
            if all(type(key) is str and not _SURROGATE.search(key) for key in value):
                return {"dict": {k: self.encode(v, (*path, k), depth) for k, v in value.items()}}
            kind = "items"
        return {kind: [self._encode_pair(k, v, path, depth) for k, v in value.items()]}

    def _encode_pair(self, key: Any, value: Any, path: tuple[Any, ...], depth: int) -> list[Any]:
        if not isinstance(key, str | int | float):
            self._refuse(path, f"expected texts and numbers as keys, got {type(key).__name__}")
        return [self._encode_plain(key, path), self.encode(value, (*path, key), depth)]

    def _refuse(self, path: tuple[Any, ...], why: str) -> NoReturn:
        place = "".join(f"[{shown(key)}]" for key in path) or "the value"
        raise ConfigError(f"{place}: cannot be saved: {why}")


_KIND_OF: Final[dict[type, str]] = {OrderedDict: "ordered", Counter: "counter"}


class _Decoder:
    def __init__(self, get: Get) -> None:
        self._get = cache(get)
        self._left = MOST_TREE_NODES
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "tuple": lambda held, depth: tuple(self._items(held, depth)),
            "dict": self._dict,
            "items": lambda held, depth: dict(self._pairs(held, depth)),
            "ordered": lambda held, depth: OrderedDict(self._pairs(held, depth)),
            "counter": lambda held, depth: Counter(dict(self._pairs(held, depth))),
            "bytes": lambda held, _: _parse_bytes(held),
            "int": lambda held, _: _parse_int(held),
            "float": lambda held, _: _parse_float(held),
            "text": lambda held, _: _parse_text(held),
            "tensor": self._tensor,
        }

    def decode(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise FormatError(f"values: expected at most {MOST_TREE_NODES} of them")
        if depth < 0:
            raise FormatError(f"values: expected at most {MOST_TREE_DEPTH} within each other")
        if value is None or type(value) in (bool, str, int, float):
            return _check_plain(value)
        if type(value) is list:
            return self._items(value, depth)
        if type(value) is not dict or len(value) != 1:
            raise FormatError(f"values: expected an object with one key, got {shown(value)}")
        ((kind, held),) = value.items()
        if kind not in self._kinds:
            raise FormatError(
                f"values: expected one of {', '.join(self._kinds)}, got {shown(kind)}"
            )
        return self._kinds[kind](held, depth)

    def _items(self, held: Any, depth: int) -> list[Any]:
        if type(held) is not list:
            raise FormatError(f"values: expected a list, got {shown(held)}")
        return [self.decode(item, depth - 1) for item in held]

    def _dict(self, held: Any, depth: int) -> dict[str, Any]:
        if type(held) is not dict:
            raise FormatError(f"values: expected an object, got {shown(held)}")
        return {_check_plain(key): self.decode(item, depth - 1) for key, item in held.items()}

    def _pairs(self, held: Any, depth: int) -> list[tuple[Any, Any]]:
        if type(held) is not list or any(type(p) is not list or len(p) != 2 for p in held):
            raise FormatError(f"values: expected pairs of key and value, got {shown(held)}")
        pairs = [(self.decode(key, 0), self.decode(item, depth - 1)) for key, item in held]
        for key, _ in pairs:
            if not isinstance(key, str | int | float):
                raise FormatError(f"values: expected a text or number as key, got {shown(key)}")
        if len(dict(pairs)) < len(pairs):
            raise FormatError(f"values: a key is there twice in {shown([key for key, _ in pairs])}")
        return pairs

    def _tensor(self, held: Any, _: int) -> Any:
        if type(held) is not str:
            raise FormatError(f"values: expected the name of a tensor, got {shown(held)}")
        return self._get(held)


# --- leaves ---------------------------------------------------------------------------------------


def _check_plain(value: Any) -> Any:
    if type(value) is str and _SURROGATE.search(value):
        raise FormatError(f"values: expected text in UTF-8, got {shown(value)}")
    if type(value) is float and not math.isfinite(value):
        raise FormatError("values: a number is larger than any float")
    if type(value) is int and not _LEAST_PLAIN <= value <= _MOST_PLAIN:
        raise FormatError(f"values: expected a whole number of 64 bits, got {shown(value)}")
    return value


def _parse_bytes(held: Any) -> bytes:
    try:
        if type(held) is str:
            return base64.b64decode(held.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeError):
        pass
    raise FormatError(f"values: expected bytes in base64, got {shown(held)}")


def _parse_int(held: Any) -> int:
    fits = type(held) is str and len(held) <= 2 * MOST_INT_BYTES + 3
    if not fits or not _HEX_INT.fullmatch(held):
        raise FormatError(f"values: expected a whole number in hex, got {shown(held)}")
    return int(held, 16)


def _parse_float(held: Any) -> float:
    if type(held) is not str or len(held) != 16 or not _HEX.fullmatch(held):
        raise FormatError(f"values: expected the 16 hex digits of a float, got {shown(held)}")
    (value,) = struct.unpack(">d", bytes.fromhex(held))
    return float(value)


def _parse_text(held: Any) -> str:
    try:
        if type(held) is str and _HEX.fullmatch(held):
            return bytes.fromhex(held).decode("utf-8", "surrogatepass")
    except UnicodeError:
        pass
    raise FormatError(f"values: expected the hex digits of a text, got {shown(held)}")
