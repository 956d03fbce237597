"""The saves of this process: begun, finished in the call or in the background, cancelled.

A background save goes on while training does, and has a thread of its own. A model or an optimizer
has one save at a time: the next save or load of either waits for it to end. The thread is no
daemon: a process that ends finishes its saves first, which takes bounded time because every
operation on the disk has a deadline. A process that is killed leaves no checkpoint, and no file
that the next save would not remove.

`ticket.wait()` raises the error of a save, and the report of a wrapped optimizer has a line about
it. If the user's code has not waited, the next save or load of that model or optimizer raises it
instead of going on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.rank_group import RankGroup
from offload.checkpoint.saving import Save, process_group_of
from offload.core.errors import StateError, reason
from offload.core.locks import uninterrupted
from offload.core.log import LOG
from offload.core.ticket import Ticket, TicketState
from offload.params.prepared import Prepared

# A save that shows no progress for so long is not waited for any more. A file system may need that
# time to write the bytes that it accepted before.
_SILENCE_S = 1800.0


# The saves that have begun. Weak references: an ended save is freed with its last user.
_UNDER_WAY: weakref.WeakSet[Save] = weakref.WeakSet()
_LOCK = threading.Lock()
_LATEST: weakref.WeakKeyDictionary[Any, Save] = weakref.WeakKeyDictionary()


@uninterrupted
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    keeper: Prepared | None,
    extra: Any,
    keep: int | None,
    in_background: bool,
    stateful: Mapping[str, Any],
) -> Path | Ticket[Path]:
    """See `offload.save`."""
    rank_group = RankGroup.gather(f"save of {path}", process_group_of(optimizer, keeper))

    def prepare() -> Save:
        if keeper is not None:
            keeper.check_age()
        task = Save(path, model, optimizer, keeper, extra, keep, stateful, rank_group)
        await_saves(task.owners)
        _UNDER_WAY.add(task)
        return task

    try:
        task = rank_group.own_by_consensus("arguments", prepare)
    except BaseException:
        rank_group.leave()
        raise
    with task.turn():
        task.begin()
        return start(task) if in_background else task.finish()


@uninterrupted
def start(task: Save) -> Ticket[Path]:
    """Finish the task in a thread of its own; return its ticket, which ends with the path."""
    ticket = task.ticket
    with _LOCK:
        for owner in task.owners:
            _LATEST[owner] = task
    thread = threading.Thread(
        target=_finish, args=(task,), name=f"offload save of {task.path.name}", daemon=False
    )
    try:
        thread.start()
    except BaseException as error:
        task.give_up(error)
        _forget(task)
        task.is_over.set()
        raise
    return ticket


def _finish(task: Save) -> None:
    try:
        path = task.finish()
    except BaseException as error:
        LOG.error("background save of %s failed: %s", task.path, reason(error))
        task.tell_failure(error)
        task.ticket.fail(error)
    else:
        _forget(task)
        task.ticket.finish(path)
    finally:
        task.is_over.set()


@uninterrupted
def await_saves(owners: Sequence[Any]) -> None:
    """Wait until no save of these owners is in flight. Raises a `StateError` with the error of one
    that failed, if no caller has taken it from the ticket yet.
    """
    with _LOCK:
        tasks = {id(task): task for owner in owners if (task := _LATEST.get(owner)) is not None}
    for task in tasks.values():
        task.is_over.wait(f"background save of {task.path}", _SILENCE_S, task.progress)
        _forget(task)
        if task.ticket.state is TicketState.FAILED:  # and not collected
            try:
                task.ticket.wait()
            except BaseException as error:
                raise StateError(
                    f"save: the background save of {task.path} failed, and its ticket was "
                    f"never waited for: {reason(error)}; nothing of it was kept, older checkpoints "
                    "are unchanged, and this call did nothing: call again"
                ) from error


def _forget(task: Save) -> None:
    with _LOCK:
        for owner in [owner for owner, known in _LATEST.items() if known is task]:
            del _LATEST[owner]


def cancel_all(error: BaseException) -> None:
    """Cancel the saves in flight in all threads of this process: each ends with `error`, or well if
    it is through already. What they have made is removed. Does not wait for that.
    """
    for task in list(_UNDER_WAY):
        task.cancel(error)
