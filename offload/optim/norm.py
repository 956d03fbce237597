"""The norm of all gradients of a step: over all ranks, where parameters are DTensors.

Ranks need one another's part of it. A rank that refuses its step before they have it tells them,
so that they refuse theirs, too, and nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from offload.core.errors import StateError
from offload.distributed import is_sharded, placing_of, sum_over_meshes
from offload.optim.pending_step import PendingStep


class GlobalNorm:
    """Of one step. max_norm: None where nobody wants to know."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        # Also of those that have no gradient: every rank comes with the same.
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._is_shared = max_norm is not None and any(map(is_sharded, self._params))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Around the step. Others raise `StateError` where it fails before they have our part."""
        try:
            yield
        except Exception:
            if self._is_shared:
                with suppress(StateError):  # the first error is the one to tell
                    self._share({}, went_well=False)
            raise

    def complete(self, pending: PendingStep) -> None:
        """Add what the other ranks have; a step that they refuse is undone."""
        if not self._is_shared:
            return
        squares = pending.squares
        assert squares is not None, "somebody wants the norm"
        pending.complete(lambda _: self._share(squares, went_well=True))

    def _share(self, squares: Mapping[int, Sequence[float]], went_well: bool) -> float:
        """Once a step."""
        self._is_shared = False
        own = [
            (placing_of(param), math.fsum(squares.get(number, ())))
            for number, param in enumerate(self._params)
        ]
        return sum_over_meshes(own, went_well)
