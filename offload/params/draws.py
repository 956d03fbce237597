"""The random sources of a layer beside torch's default generators, so that a recomputation can draw
the numbers of the first run again.

The sources are Python's and numpy's global ones, those that the layer's modules have as attributes,
and those that it was seen to hand to torch. Draws from other sources are not known.
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
class Draw:
    """A source of random numbers, and its state before a run. owner: the object that has the state;
    its identity tells sources apart.
    """

    owner: object
    get: Callable[[], Any]
    set: Callable[[Any], object]
    state: Any

    @property
    def is_used(self) -> bool:
        """Whether anything was drawn since."""
        return not _is_same(self.state, self.get())


def draws_of(module: nn.Module, seen: Iterable[object] = ()) -> list[Draw]:
    """List the sources that are known now, each once. seen: torch generators that the module has
    been seen to use.
    """
    found: dict[int, Draw] = {}
    for owner in (random, sys.modules.get("numpy.random"), *seen, *_owned(module)):
        draw = None if id(owner) in found else draw_from(owner)
        if draw is not None:
            found[id(owner)] = draw
    return list(found.values())


def draw_from(owner: Any) -> Draw | None:
    """Return the state of this source, or None if it is no random number generator."""
    numpy: Any = sys.modules.get("numpy.random")
    if isinstance(owner, torch.Generator) or (numpy is not None and owner is numpy):
        return Draw(owner, owner.get_state, owner.set_state, owner.get_state())
    if isinstance(owner, random.Random) or owner is random:
        return Draw(owner, owner.getstate, owner.setstate, owner.getstate())
    if numpy is not None and isinstance(owner, numpy.RandomState):
        return Draw(owner, owner.get_state, owner.set_state, owner.get_state())
    if numpy is not None and isinstance(owner, numpy.Generator):
        bits = owner.bit_generator
        return Draw(
            owner, lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state
        )
    return None


def is_default(owner: object) -> bool:
    """Return whether torch draws from this generator, on the host or on a device, when it is given
    no other. torch's own checkpoint saves the state of those before a run; when one is seen in use
    for the first time, other code may already have drawn from it.
    """
    if not isinstance(owner, torch.Generator):
        return False
    of_device = getattr(getattr(torch, owner.device.type, None), "default_generators", ())
    return owner is torch.default_generator or any(owner is each for each in of_device)


def _owned(module: nn.Module) -> Iterator[object]:
    """Yield attributes that may be sources. A few types pass over most attributes at once."""
    for inner in module.modules():
        for value in vars(inner).values():
            if not isinstance(value, _PLAIN):
                yield value


_PLAIN = (str, int, float, dict, list, tuple, set, type(None), torch.Tensor, torch.dtype)


def _is_same(one: Any, other: Any) -> bool:
    """Compare two states, which hold numbers, tuples, dicts, tensors and numpy arrays."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@contextmanager
def drawing_again(draws: Sequence[Draw]) -> Iterator[None]:
    """Set the sources back to their states before the first run inside the `with`; restore their
    present states at its end.
    """
    now = [draw.get() for draw in draws]
    try:
        for draw in draws:
            draw.set(draw.state)
        yield
    finally:
        for draw, state in zip(draws, now, strict=True):
            draw.set(state)
