"""A choice of few among many drawn cases, such that it has every feature that any of them has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def covering(cases: Sequence[T], features: Callable[[T], set[Hashable]]) -> list[T]:
    """Choose cases until no feature is missing: always the one that adds most, the first of
    equals.
    """
    missing: set[Hashable] = set().union(*map(features, cases))
    found: list[T] = []
    while missing:
        found.append(max(cases, key=lambda case: len(features(case) & missing)))
        missing -= features(found[-1])
    return found
