"""A memory limit that the kernel enforces, for one process: a cgroup below the caller's own, where
the machine allows that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offload.core.host_facts import cgroup_levels

_LIMITS = ("memory.max", "memory.limit_in_bytes")  # v2, v1
_GONE_S = 30.0  # by then the kernel has taken the last page of an ended process off the books


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """Make a cgroup that may have so many bytes; give None where that is not possible.

    The processes that join it must have ended when the block ends.
    """
    group = _make(limit_bytes)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)


def join(group: str) -> None:
    """Put this process into the group: memory that it takes from now on counts there."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))


def _make(limit_bytes: int) -> Path | None:
    own = next((level for level in cgroup_levels("memory") if level.is_dir()), None)
    if own is None:
        return None
    group = own / f"offload-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    for name in _LIMITS:
        with suppress(OSError):
            if (group / name).exists():  # v2 has it only where the group above has handed it down
                (group / name).write_text(str(limit_bytes))
                return group
    _remove(group)
    return None


def _remove(group: Path) -> None:
    end_s = time.monotonic() + _GONE_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)
