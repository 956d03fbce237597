"""A read-only sequence over compact rows that makes each item on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar, overload

S = TypeVar("S", covariant=True)
R = TypeVar("R")
T = TypeVar("T")


class Rows(Protocol[S]):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> S: ...
    def __iter__(self) -> Iterator[S]: ...


class Decoded(Sequence[T], Generic[R, T]):
    """A lazy sequence of the items that `decode` makes of `rows`, which may not change any more.

    So a report of a long run, which few users read to the end, takes no more memory than one of a
    short run.
    """

    def __init__(self, rows: Rows[R], decode: Callable[[R], T]) -> None:
        self._rows = rows
        self._decode = decode

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        return map(self._decode, self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._decode(self._rows[index])

    def __eq__(self, other: object) -> bool:
        """Compare item by item, as lists do."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
