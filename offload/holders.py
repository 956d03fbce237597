"""Who else holds a piece of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def holders(memory: Tensor) -> int:
    """How many tensors share the memory, `memory` itself included."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without `storage` itself
