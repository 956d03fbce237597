"""The norm of all gradients of a step, summed over all ranks where parameters are DTensors.

Each rank needs the other ranks' parts of the sum. A rank that refuses its step before it has sent
its part tells the others, so that they refuse the step, too, and no rank waits for it.
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
    """The gradient norm of one step. max_norm: None if the step does not clip and needs no norm."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        # With those that have no gradient: every rank must exchange the same list.
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._is_shared = max_norm is not None and any(map(is_sharded, self._params))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Tell the other ranks if the block, this rank's step, raises before they have this rank's
        part of the norm; they then raise `StateError`.
        """
        try:
            yield
        except Exception:
            if self._is_shared:
                with suppress(StateError):  # the first error is the one to raise
                    self._share({}, went_well=False)
            raise

    def complete(self, pending: PendingStep) -> None:
        """Add the other ranks' parts of the norm; a step that one of them refuses is undone."""
        if not self._is_shared:
            return
        squares = pending.squares
        assert squares is not None, "the norm was asked for"
        pending.complete(lambda _: self._share(squares, went_well=True))

    def _share(self, squares: Mapping[int, Sequence[float]], went_well: bool) -> float:
        """Exchange the ranks' parts and return their sum. Called at most once in a step."""
        self._is_shared = False
        own = [
            (placing_of(param), math.fsum(squares.get(number, ())))
            for number, param in enumerate(self._params)
        ]
        return sum_over_meshes(own, went_well)
