"""Casts of weights by `torch.autocast`, held for one unit at a time.

torch keeps the cast of every weight until the outermost autocast ends: at the end of a forward pass
that is a copy of the whole model, regardless of the budget. If nothing else keeps the casts, they
are dropped when another unit begins to run; the next use casts again, to the same values. If
autograd keeps them for backward anyway, they stay: dropping them would free no memory.
"""

from __future__ import annotations

import torch

from offload.core.metrics import Metrics
from offload.planning.unit import Unit


class Casts:
    """The autocast casts of one model, on one type of device. One thread at a time."""

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        self._type = device.type
        self._metrics = metrics
        self._last: int | None = None  # unit that began last
        self._dropped: set[int] = set()  # units of this pass that are in the graph with their casts

    def restart(self) -> None:
        """Begin a run of the model: forget the units of the last one."""
        self._last = None
        self._dropped = set()

    def begin(self, unit: Unit, are_kept: bool) -> None:
        """Begin a unit: under autocast, drop the casts that torch holds for other units. are_kept:
        autograd keeps casts anyway; none are dropped.
        """
        last, self._last = self._last, unit.number
        if last == unit.number or not torch.is_autocast_enabled(self._type):
            return
        if are_kept:
            return
        torch.clear_autocast_cache()
        if not torch.is_grad_enabled():
            return
        if unit.number in self._dropped:
            self._metrics.note(
                "autocast",
                f"{unit.name} runs more than once in a pass, with others in between: its weights "
                "are cast each time, so that their gradients are summed in the weights' own type; "
                "plain torch sums them in autocast's",
            )
        self._dropped.add(unit.number)
