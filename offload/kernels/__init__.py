"""Update rules, gradient statistics, casts and checksums on host memory.

`calls` are the typed calls of the native core; `reference` has the same in plain torch (the
standard for the tests, and the fall-back without the native core); `rules` has the scalars of each
update rule; `arguments` checks tensors before a byte is written.
"""

from __future__ import annotations

from offload.kernels.calls import (
    STATS_BLOCK,
    SUM_BYTES,
    TORCH_WIDTH,
    GradStats,
    available_isas,
    cast,
    checksum,
    forced_isa,
    grad_stats,
    isa,
    native_error,
    num_threads,
    set_num_threads,
    update,
)

__all__ = [
    "STATS_BLOCK",
    "SUM_BYTES",
    "TORCH_WIDTH",
    "GradStats",
    "available_isas",
    "cast",
    "checksum",
    "forced_isa",
    "grad_stats",
    "isa",
    "native_error",
    "num_threads",
    "set_num_threads",
    "update",
]
