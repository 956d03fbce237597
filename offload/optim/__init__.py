"""Optimizers whose state lives in host memory and on disk.

Read in this order: `recipe` (what a step does to a slice), `records` (of which parameters),
`choose` (for which optimizer), `tiers` (where chunks are), `pipeline` (how chunks pass through the
update), `staging` and `grad_buffers` (how gradients get from a device to host memory), `updater`
(one step), `coordinator` (alone, or with others), `session` (everything one wrapped optimizer
holds), `optimizer` (what the user sees). Beside them: `opening` (what is refused), `source` and
`export` (state in and out), `consistency` (one act at a time, and what an error leaves behind).
"""

from __future__ import annotations

from offload.optim.lion import Lion
from offload.optim.optimizer import OffloadOptimizer, attach, inner_optimizer, is_wrapped
from offload.optim.session import Session

__all__ = ["Lion", "OffloadOptimizer", "Session", "attach", "inner_optimizer", "is_wrapped"]
