"""What keeps an optimizer's parameters and state of one age, and what helps when they are not.

Acts on one optimizer exclude each other.

An error in the middle of a step leaves some slices one step ahead of the others; an error in the
middle of a load leaves states of two origins. Such a mixture must not be stepped or saved. A whole
`load_state_dict` mends it. After a failed step the parameters are mixed as well, so they must be
loaded first: parameters that the step may have changed and that user code has not written to since
are refused by name. (Writes through `.data` are not seen; the error message tells a way round.)
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from offload.core.errors import StateError
from offload.core.locks import attempt
from offload.core.log import LOG
from offload.distributed.placing import local_of
from offload.optim.recipe import Record

STEP, LOAD = "step", "load_state_dict"
CHECKPOINT = "load of a checkpoint"
MOVE = "move of the state to another plan"


def _likeness(param: Tensor, may_move: bool) -> tuple[int, ...]:
    """Return the parameter's address and versions. Both versions count: a write to a DTensor does
    not change the version of its local part. may_move: the engine may change or free the
    parameter's memory at any time, so only the version is compared.
    """
    if may_move:
        return (param._version,)
    local = local_of(param)
    return local.data_ptr(), local._version, param._version


def clear_frames(error: BaseException | None) -> None:
    """Release the tensors that the frames of an error hold, however long the error is kept: a
    notebook keeps the last one, and the budget would be in use for as long.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # the chain may be cyclic
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Consistency:
    """The verdict on one optimizer's parameters and state. may_move: the parameters belong to a
    prepared model, whose engine moves them.
    """

    def __init__(self, may_move: bool) -> None:
        self._may_move = may_move
        self.last_checkpoint: str | None = None  # names the newest state that was handed out
        self._error: BaseException | None = None
        self._act = ""
        # As the failed step left them: each parameter's name, the parameter, and its likeness.
        self._touched: list[tuple[str, Tensor, tuple[int, ...]]] = []

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    def lose(self, act: str, error: BaseException, touched: Sequence[Record] = ()) -> None:
        """Note that `act` failed with `error` in its middle. touched: parameters it may have
        changed.
        """
        self._act, self._error = act, error
        LOG.error(
            "%s failed halfway; nothing can be stepped or saved until a whole "
            "checkpoint is loaded: %s: %s",
            act,
            type(error).__name__,
            str(error),  # not the error: a handler that keeps the record would keep its frames
        )
        if act == STEP:  # keep the list if a load fails later: the parameters are still mixed
            self._touched = [
                (record.name, record.param, _likeness(record.param, self._may_move))
                for record in touched
            ]

    def mend(self) -> None:
        """Note that all state has been replaced."""
        self._error, self._touched = None, []

    def let_go(self) -> None:
        """Clear the frames of the kept error, so that it does not hold memory to be released."""
        clear_frames(self._error)

    def check(self) -> None:
        """Raise `StateError` if parameters and state are mixed: no step, no save."""
        if self._error is None:
            return
        known = self.last_checkpoint or "none is known here"
        if self._act in (STEP, CHECKPOINT) or self._touched:
            what = (
                "parameters and state are from different steps; load a checkpoint into the model, "
                f"then its optimizer state by load_state_dict (the last one: {known})"
            )
        else:
            what = "the state is of two origins; load it again (the parameters are as they were)"
        raise StateError(
            f"optimizer: an earlier {self._act} failed halfway, so that {what}; "
            f"the error was: {type(self._error).__name__}: {self._error}"
        ) from self._error

    def tell(self, what: str) -> None:
        """Warn if `what` hands out mixed values."""
        if self._error is not None:
            LOG.warning(
                "%s: an earlier %s failed halfway, so that these values are from "
                "different steps; load a whole checkpoint before they are used",
                what,
                self._act,
            )

    def check_mendable(self) -> None:
        """Refuse a load that would leave parameters from different steps."""
        left = [
            name
            for name, param, likeness in self._touched
            if _likeness(param, self._may_move) == likeness
        ]
        if left:
            raise StateError(
                f"optimizer: an earlier step failed halfway, and {left[0]} "
                f"(one of {len(left)}) may be of another step than the rest, and was not "
                "written since; load the model's checkpoint first, then the optimizer's (weights "
                "that "
                "were put in through .data are not seen: close() then, and wrap or prepare again)"
            ) from self._error


class ExclusiveAccess:
    """The mutual exclusion of acts on one wrapped optimizer: one process, one thread, one act at a
    time.

    A step moves chunks through a fixed set of buffers and changes state as it goes. Another step,
    save or load meanwhile would read or leave a mixture. Such a call is refused, not kept waiting:
    the state that it asked for would have changed by the time it could run. This holds for other
    threads, and for a signal handler that runs in the middle of an act of its own thread.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._holder = ""  # what the thread that holds the lock does, for other threads' messages
        self._act: str | None = None  # the running act; no other may begin in its middle

    @contextmanager
    def act(self, what: str, may_nest: bool = False) -> Iterator[None]:
        """Keep other threads out while the block runs, and every other act, also those of the same
        thread's signal handlers and hooks; raise `StateError` if one is inside. may_nest: acts of
        the same thread may be around the block and inside it, as hooks make them. Inside the block
        Ctrl-C takes effect only where the thread waits, and at the end.
        """
        if os.getpid() != self._pid:
            raise StateError(
                "optimizer: wrapped by the parent process; a forked child must not use it"
            )
        with attempt(self._lock) as is_ours:
            if not is_ours:
                raise StateError(
                    f"optimizer: {what} while another thread is in {self._holder}; let one thread "
                    "use a wrapped optimizer at a time, or put a lock around its calls"
                )
            if self._act is not None and not may_nest:
                raise StateError(
                    f"optimizer: {what} in the middle of {self._act}; a signal handler or a hook "
                    "has to wait until that has returned (set a flag, and look at it in the loop)"
                )
            before = self._holder, self._act
            self._holder, self._act = what, self._act if may_nest else what
            try:
                yield
            finally:
                self._holder, self._act = before
