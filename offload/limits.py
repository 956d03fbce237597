"""How much host memory one call may take, and where it may put the rest."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.budget import HOST
from offload.config import Config, format_size
from offload.errors import CapacityError, ConfigError
from offload.machine import free_memory_bytes, read_memory
from offload.neighbours import current

_LEAVE_SHARE, _LEAVE_BYTES = 0.2, 8 << 30  # of the machine, for everybody else


def check_directories(config: Config) -> None:
    """Also where everything fits in memory today: another plan, later, may need them."""
    for path in config.nvme or ():  # type: ignore[union-attr]
        directory = Path(path)
        if not directory.is_dir():
            raise ConfigError(f"nvme: {directory} is not a directory; make it, or give another")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"nvme: {directory} cannot be written to; allow it, or give another")


def refuse_unbuilt(config: Config, names: Iterable[str], what: str) -> None:
    """A field that does nothing yet is an error, not a silence."""
    default = Config()
    for name in names:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{name}: not built yet for {what}; leave it out")


@contextmanager
def limited(config: Config) -> Iterator[None]:
    """One limit for the process; as it was if what is inside fails. That of earlier users has ended
    when they have gone.
    """
    before = HOST.limit_bytes
    if config.host_memory is not None or HOST.used_bytes == 0:
        HOST.limit(None if config.host_memory is None else int(config.host_memory))
    try:
        yield
    except BaseException:
        HOST.put_back_limit(before)
        raise


@contextmanager
def telling_of_the_budget(config: Config) -> Iterator[None]:
    """Whoever gave no `host_memory` is told where the number in a refusal comes from."""
    try:
        yield
    except CapacityError as error:
        if config.host_memory is not None:
            raise
        raise CapacityError(
            f"{error} (host_memory was not given: then it is what is left of an earlier limit, or "
            f"what is free now less {_LEAVE_SHARE:.0%} of the machine or "
            f"{format_size(_LEAVE_BYTES)}, for each rank on it a part)"
        ) from error


def host_bytes(config: Config) -> tuple[int | None, int]:
    """Host bytes for this call: what was asked for, or what is left of the limit that stands,
    or what leaves the machine enough, shared with other ranks on it. And what others hold already.
    """
    if HOST.used_bytes:
        gc.collect()  # what holds itself and nobody else, a trainer say, may hold some of it
    held, limit = HOST.used_bytes, config.host_memory
    if limit is None and held:
        limit = HOST.limit_bytes
    if limit is not None:
        return max(0, int(limit) - held), held
    memory = read_memory()
    free = free_memory_bytes(memory)
    if free is None or memory.total_bytes is None:
        return None, 0
    total = min(memory.total_bytes, memory.cgroup_limit_bytes or memory.total_bytes)
    left = free - max(int(total * _LEAVE_SHARE), _LEAVE_BYTES)
    return current().part_of(max(0, left), least=0), 0
