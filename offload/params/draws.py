"""Where a layer's random numbers come from, beside torch's default generators: so that a second run
of it can draw those of the first.

Python's own and numpy's global ones, those that the layer's modules have as attributes, and those
that it was seen to hand to torch. What it draws from elsewhere nobody knows of.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class RandomSource:
    """One state of random numbers that somebody has. owner: tells it from others."""

    owner: object
    get: Callable[[], Any]
    set: Callable[[Any], object]


@dataclass(frozen=True, eq=False)
class Draw:
    """A source, and its state before a run."""

    source: RandomSource
    state: Any

    @classmethod
    def of(cls, source: RandomSource) -> Draw:
        return cls(source, source.get())

    @property
    def is_used(self) -> bool:
        """Whether anything was drawn since."""
        return not _is_same(self.state, self.source.get())


def sources_of(module: nn.Module, seen: Iterable[object] = ()) -> list[RandomSource]:
    """Those that are known now, each once. seen: torch's, that it has been seen to use."""
    found = {id(source.owner): source for source in _global_sources()}
    for owner in (*seen, *_owned(module)):
        source = source_at(owner)
        if source is not None:
            found[id(owner)] = source
    return list(found.values())


def source_at(owner: Any) -> RandomSource | None:
    """What draws from this object, if anything does."""
    if isinstance(owner, torch.Generator):
        return RandomSource(owner, owner.get_state, owner.set_state)
    if isinstance(owner, random.Random):
        return RandomSource(owner, owner.getstate, owner.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(owner, numpy.RandomState):
        return RandomSource(owner, owner.get_state, owner.set_state)
    if numpy is not None and isinstance(owner, numpy.Generator):
        bits = owner.bit_generator
        return RandomSource(owner, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def is_default(owner: object) -> bool:
    """Whether torch draws from it, on the host or on a device, where no other is given. torch's own
    checkpoint has the state of those before a run; when one is handed over for the first time
    others may have drawn from it.
    """
    if not isinstance(owner, torch.Generator):
        return False
    of_device = getattr(getattr(torch, owner.device.type, None), "default_generators", ())
    return owner is torch.default_generator or any(owner is each for each in of_device)


def _global_sources() -> Iterator[RandomSource]:
    yield RandomSource(random, random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield RandomSource(numpy, numpy.get_state, numpy.set_state)


def _owned(module: nn.Module) -> Iterator[object]:
    """Attributes that may be sources: a few types, so that most are passed over at once."""
    for inner in module.modules():
        for value in vars(inner).values():
            if not isinstance(value, _PLAIN):
                yield value


_PLAIN = (str, int, float, dict, list, tuple, set, type(None), torch.Tensor, torch.dtype)


def _is_same(one: Any, other: Any) -> bool:
    """Of states, which hold numbers, tuples, dicts, tensors and numpy's arrays."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@contextmanager
def drawing_again(draws: Sequence[Draw]) -> Iterator[None]:
    """Inside, sources are where they were before the first run; afterwards where they are now."""
    now = [draw.source.get() for draw in draws]
    try:
        for draw in draws:
            draw.source.set(draw.state)
        yield
    finally:
        for draw, state in zip(draws, now, strict=True):
            draw.source.set(state)
