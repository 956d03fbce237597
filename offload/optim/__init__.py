"""Optimizers whose state lives in host memory and on disk.

Read in this order: `recipe` (what a step does to a slice), `generic` and `choose` (for which
optimizer), `tiers` (where chunks are), `pipeline` (how they pass), `updater` (a step), `session`
(what is held), `optimizer` (what the user sees).
"""

from __future__ import annotations

from offload.optim.choose import choose_recipe
from offload.optim.lion import Lion
from offload.optim.optimizer import OffloadOptimizer, attach, is_wrapped
from offload.optim.session import Session

__all__ = ["Lion", "OffloadOptimizer", "Session", "attach", "choose_recipe", "is_wrapped"]
