"""Optimizers whose state lives in host memory and on disk.

Read in this order: `recipe` (what a step does to a slice), `records` (of which parameters),
`generic` and `choose` (for which optimizer), `tiers` (where chunks are), `pipeline` (how they
pass), `staging_buffer` and `grad_buffers` (how gradients come from a device), `updater` (a step),
`session` (what is held), `optimizer` (what the user sees). Beside them: `request` (what is
refused), `incoming` and `plain` (state from and to torch), `turn` (who may), `consistency` (what is
left after an error).
"""

from __future__ import annotations

from offload.optim.lion import Lion
from offload.optim.optimizer import OffloadOptimizer, attach, is_wrapped
from offload.optim.request import WrapRequest
from offload.optim.session import Session

__all__ = ["Lion", "OffloadOptimizer", "Session", "WrapRequest", "attach", "is_wrapped"]
