"""Background saves, which go on while training does.

Each has a thread of its own. A model or an optimizer has one save at a time: the next save or load
of either waits for it to end. The thread is no daemon: a process that ends finishes its saves
first, which takes bounded time because every operation on the disk has a deadline. A process that
is killed leaves no checkpoint, and no file that the next save would not remove.

`ticket.wait()` raises the error of a save, and the report of a wrapped optimizer has a line about
it. If the user's code has not waited, the next save or load of that model or optimizer raises it
instead of going on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from offload.core.errors import StateError, reason
from offload.core.locks import Flag, uninterrupted
from offload.core.log import LOG
from offload.core.ticket import Ticket, TicketState

# A save that shows no progress for so long is not waited for any more. A file system may need that
# time to write the bytes that it accepted before.
_SILENCE_S = 1800.0


class SaveTask(Protocol):
    """A save that has written all that may change, and that `start` finishes in a thread."""

    path: Path
    owners: list[Any]  # the model and the optimizer that are saved

    def finish(self) -> Path: ...

    def give_up(self, error: BaseException) -> None: ...

    def tell_failure(self, error: BaseException) -> None: ...

    def progress(self) -> object:
        """Return a value that changes whenever the save has made progress."""


class _BackgroundSave:
    """A save that is in flight, or that has failed and whose error was not raised yet."""

    def __init__(self, task: SaveTask) -> None:
        self.path = task.path
        self.ticket: Ticket[Path] = Ticket(f"save of {task.path}")
        self.error: BaseException | None = None
        self.is_over = Flag()
        self.progress = task.progress

    @property
    def is_untold(self) -> bool:
        return self.error is not None and self.ticket.state is TicketState.FAILED


_LOCK = threading.Lock()
_LATEST: weakref.WeakKeyDictionary[Any, _BackgroundSave] = weakref.WeakKeyDictionary()


@uninterrupted
def start(task: SaveTask) -> Ticket[Path]:
    """Finish the task in a thread of its own; return its ticket, which ends with the path."""
    run = _BackgroundSave(task)
    with _LOCK:
        for owner in task.owners:
            _LATEST[owner] = run
    thread = threading.Thread(
        target=_finish, args=(task, run), name=f"offload save of {task.path.name}", daemon=False
    )
    ticket = run.ticket
    try:
        thread.start()
    except BaseException as error:
        task.give_up(error)
        _forget(run)
        run.is_over.set()
        raise
    return ticket


def _finish(task: SaveTask, run: _BackgroundSave) -> None:
    try:
        path = task.finish()
    except BaseException as error:
        LOG.error("background save of %s failed: %s", run.path, reason(error))
        run.error = error
        task.tell_failure(error)
        run.ticket.fail(error)
    else:
        _forget(run)
        run.ticket.finish(path)
    finally:
        run.is_over.set()


@uninterrupted
def await_saves(owners: Sequence[Any]) -> None:
    """Wait until no save of these owners is in flight. Raises a `StateError` with the error of one
    that failed, if no caller has taken it from the ticket yet.
    """
    with _LOCK:
        runs = {id(run): run for owner in owners if (run := _LATEST.get(owner)) is not None}
    for run in runs.values():
        run.is_over.wait(f"background save of {run.path}", _SILENCE_S, run.progress)
        _forget(run)
        if run.is_untold:
            try:
                run.ticket.wait()
            except BaseException as error:
                raise StateError(
                    f"save: the background save of {run.path} failed, and its ticket was "
                    f"never waited for: {reason(error)}; nothing of it was kept, older checkpoints "
                    "are unchanged, and this call did nothing: call again"
                ) from error


def _forget(run: _BackgroundSave) -> None:
    with _LOCK:
        for owner in [owner for owner, known in _LATEST.items() if known is run]:
            del _LATEST[owner]
