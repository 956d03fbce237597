"""Ranks, by `torch.distributed`."""

from __future__ import annotations

import torch.distributed


def is_connected() -> bool:
    """Whether this process belongs to a group of several."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1
