"""What the examples print when they are done: did it learn, and where were the bytes?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from torch import nn

from offload.config import format_size
from offload.prepared import prepared_of

NVME = tempfile.gettempdir()  # better: a directory on your fastest drive


def tell(model: nn.Module, losses: Sequence[float]) -> None:
    """The losses, and the bytes of a prepared model in memory, on disk, and on their way."""
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    tell_bytes(type(model).__name__, model)


def tell_bytes(name: str, model: nn.Module) -> None:
    """What it takes of host memory and disk, and what has gone from one to the other so far."""
    made = prepared_of(model)
    assert made is not None, "not prepared, or closed already"
    counts = made.metrics.snapshot().counts
    hits, misses = counts.get("parameter_hits", 0), counts.get("parameter_misses", 0)
    on_disk = made.store.stats().used_bytes if made.store else 0
    read, written = (counts.get(f"disk_{what}_bytes", 0) for what in ("read", "written"))
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    print(f"  {made.shares}")
    moved = f"read {format_size(read)}, written {format_size(written)}"
    print(f"  on disk: {format_size(on_disk)}; {moved}")
    if hits + misses:
        print(f"  parameters fetched: {hits + misses}, {hits / (hits + misses):.0%} ahead of time")
