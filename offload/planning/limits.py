"""The limits of one call: how much host memory it may take, and where it may put the rest."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from offload.core.budget import HOST, BudgetHolder, held_by
from offload.core.config import Config, format_size
from offload.core.errors import CapacityError, ConfigError
from offload.core.host_facts import Memory, free_memory_bytes, read_memory
from offload.core.node_share import current
from offload.core.strict_json import printable

_LAST_ERROR = ("last_exc", "last_value", "last_traceback")  # kept by a notebook or a prompt
_LEAVE_SHARE, _LEAVE_BYTES = 0.2, 8 << 30  # of the machine, for other processes
_LEAVE_MOST_SHARE = 0.4  # of a small one, where 8 GiB would be most of it or more


def check_directories(config: Config) -> None:
    """Check that the `nvme` directories can be written to, also where everything fits in memory
    today: a later plan may need them.
    """
    for path in config.nvme or ():  # type: ignore[union-attr]
        directory, name = Path(path), printable(path)
        if not directory.is_dir():
            raise ConfigError(f"nvme: {name} is not a directory; make it, or give another")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"nvme: {name} cannot be written to; allow it, or give another")


def refuse_unbuilt(config: Config, names: Iterable[str], what: str) -> None:
    """Refuse config fields that have no effect yet, so that none is ignored silently."""
    default = Config()
    for name in names:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{name}: not built yet for {what}; leave it out")


@contextmanager
def limited(config: Config, holder: str) -> Iterator[None]:
    """Set the process's limit of host memory; restore it if the block raises. A limit of earlier
    holders ends when all of them have closed. holder: the name under which later refusals list the
    memory that the block takes.
    """
    before = HOST.limit_bytes
    if config.host_memory is not None or HOST.used_bytes == 0:
        HOST.limit(None if config.host_memory is None else int(config.host_memory))
    try:
        with held_by(BudgetHolder(holder)):
            yield
    except BaseException:
        HOST.put_back_limit(before)
        raise


@contextmanager
def telling_of_the_budget(config: Config) -> Iterator[None]:
    """Add to a refusal in the block who holds the budget already, and where its number comes from
    if no `host_memory` was given.
    """
    holders = HOST.holders()
    try:
        yield
    except CapacityError as error:
        origin = ""
        if config.host_memory is None:
            origin = f" (host_memory was not given: {_origin()})"
        if not holders and not origin:
            raise
        raise CapacityError(f"{error}{origin}{_told_holders(holders)}") from error


def _told_holders(holders: Mapping[str, int]) -> str:
    """Tell which holders have taken of the process's limit, and how their memory is released."""
    if not holders:
        return ""
    each = ", ".join(f"{format_size(nbytes)} by {name}" for name, nbytes in holders.items())
    told = (
        f"; of the limit for the process {format_size(sum(holders.values()))} are held: {each}; "
        "offload.close(...) what is not needed any more, or del every name that has it"
    )
    kept = [name for name in _LAST_ERROR if getattr(sys, name, None) is not None]
    if kept:  # an interactive session, where no name refers to an old model any more
        names = " = ".join(f"sys.{name}" for name in kept)
        told += f"; the last error that was shown here may keep it, too: {names} = None"
    return told


def _origin() -> str:
    """Tell where the number comes from that stands in for `host_memory`, and what to give."""
    if HOST.used_bytes and HOST.limit_bytes is not None:
        limit, held = format_size(HOST.limit_bytes), format_size(HOST.used_bytes)
        return f"an earlier call has set {limit} for the process, {held} of it are held; give more"
    memory = read_memory()
    total, free = _total_bytes(memory), free_memory_bytes(memory)
    if total is None or free is None:
        return "then it is without a limit"
    is_group = memory.cgroup_limit_bytes == total
    where = "the limit of this container (cgroup)" if is_group else "this machine's memory"
    ranks = current()
    shared = f", for {ranks.count} ranks" if ranks.count > 1 else ""
    return (
        f"{format_size(free)} are free of {format_size(total)}, {where}; of these "
        f"{format_size(left_free_bytes(total))} stay free for everybody else{shared}; give "
        "host_memory a number, of what is free at most"
    )


def left_free_bytes(total_bytes: int) -> int:
    """Return how much of so much memory stays free if `host_memory` is not given: a fifth, and at
    least 8 GiB; but no more than two fifths, so that a container of 4 or 8 GiB can be used at all.
    """
    least = min(_LEAVE_BYTES, int(total_bytes * _LEAVE_MOST_SHARE))
    return max(int(total_bytes * _LEAVE_SHARE), least)


def _total_bytes(memory: Memory) -> int | None:
    """Return the memory of the machine, or of the cgroup if that has less; None: not known."""
    known = (memory.total_bytes, memory.cgroup_limit_bytes)
    return min((n for n in known if n is not None), default=None)


def host_bytes(config: Config) -> tuple[int | None, int]:
    """Return the host bytes for this call, and those that other holders have already. The former
    are `host_memory`, or what is left of the present limit, or what leaves the machine enough,
    divided among its ranks. None: no limit.
    """
    if HOST.used_bytes:
        gc.collect()  # a reference cycle, such as a dropped trainer's, may hold some of it
    held, limit = HOST.used_bytes, config.host_memory
    if limit is None and held:
        limit = HOST.limit_bytes
    if limit is not None:
        return max(0, int(limit) - held), held
    memory = read_memory()
    free = free_memory_bytes(memory)
    total = _total_bytes(memory)
    if free is None or total is None:
        return None, 0
    left = free - left_free_bytes(total)
    return current().part_of(max(0, left), least=0), 0
