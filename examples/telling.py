"""What the examples print when they are done: did it learn, and where were the bytes?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from torch import nn

import offload
from offload.core.config import format_size

NVME = tempfile.gettempdir()  # better: a directory on your fastest drive


def tell(model: nn.Module, losses: Sequence[float]) -> None:
    """Print the losses, and the bytes of a prepared model in memory, on disk, and in transit."""
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    tell_bytes(type(model).__name__, model)


def tell_bytes(name: str, model: nn.Module) -> None:
    """Print what a model takes of host memory and disk, and the bytes read and written so far."""
    told = offload.report(model)
    use = told.model
    assert use is not None, "not prepared, or closed already"
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    print(f"  {use.shares}")
    read, written = format_size(told.disk_read_bytes), format_size(told.disk_written_bytes)
    print(f"  on disk: {format_size(use.disk_bytes)}; read {read}, written {written}")
    rate = told.iterations.hit_rate
    if rate is not None:
        print(f"  parameters: {rate:.0%} of the blocks were there or on their way when needed")
