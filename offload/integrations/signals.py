"""Signals on which training saves a checkpoint: before its time limit, or at its end.

A handler only notes the signal. The save happens at a safe point: at the end of `optimizer.step()`,
or in `point()` if further objects are saved, which are updated after the step. A thread, started at
the beginning, enforces the limit even if the main thread is busy.

Among ranks, a signal to one of them is for all. At its next safe point that rank sets a shared flag
(`side_channel.py`) and goes on; all ranks save at the safe point after that one. No rank is past it
if the steps contain collectives of all ranks; loops without any agree on the last of their points.
Each safe point costs one request to read the flag. A forked child (a loader's worker) does not
train: it has none of this, and signals to it have their usual effect. An error is written to stderr
as one line, independently of the log: the process may end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.api import save
from offload.checkpoint.draft import check_path, free_path
from offload.checkpoint.optimizer import innermost
from offload.checkpoint.rank_group import RankGroup
from offload.checkpoint.saves import (
    await_saves,
    cancel_all,
    check_arguments,
    process_group_of,
)
from offload.checkpoint.trees import SavedTreeTensors
from offload.core.errors import ConfigError, StateError
from offload.core.log import LOG
from offload.distributed.side_channel import SharedFlag
from offload.optim import is_wrapped
from offload.params.prepared import prepared_of

GOES_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # after these, training goes on
_GRACE = 0.2  # share of the limit that is reserved for removing a cancelled save
_MOST_GRACE_S = 2.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the sender


class SaveRequest(IntEnum):
    """What the signals so far ask for. A request replaces only lesser ones."""

    NOTHING = 0  # no signal yet
    SAVE = 1  # save and go on
    END = 2  # save and end
    ENDING = 3  # has saved or failed to; the process ends


class save_on_signal:
    """A handler that saves `model` and `optimizer` as `offload.save` does when one of `signals`
    arrives.

    It is in force until `close()`, or inside `with offload.save_on_signal(...) as saver:`. Make it
    in the main thread, one at a time: further models and optimizers are given by name, as stateful.

    After SIGUSR1 and SIGUSR2 training goes on; after any other signal (SIGTERM) the process ends
    with exit code 128 + the signal's number, at most `limit_s` seconds after the signal. A step or
    save in progress is completed first. A save that is not complete within the limit is cancelled
    and removed; older checkpoints stay as they were. A signal after the last step takes effect
    where `with` ends. A save that fails is reported on stderr, after SIGUSR1 and SIGUSR2 also in
    the report.

    path: of the new checkpoint; if it exists already, `<path>-2`, `<path>-3`, ...; or a function
    that returns a path. extra: plain values, or a function that returns them at the save. stateful:
    as in `offload.save`. If there are any (a scheduler steps after the optimizer), call
    `saver.point()` at the end of every iteration: the save happens there.

    With several ranks, use it on all of them: a signal to one is a signal to all, and all save
    together, one step later than a single process would. So leave two steps and a save within the
    limit.
    """

    def __init__(
        self,
        path: str | PathLike[str] | Callable[[], str | PathLike[str]],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        limit_s: float = 10.0,
        extra: Any = None,
        keep: int | None = None,
        **stateful: Any,
    ) -> None:
        self._signals = _checked(signals, limit_s)
        _check_save(path, model, extra, keep, stateful)
        self._path, self._model, self._optimizer = path, model, optimizer
        self._limit_s, self._extra, self._keep = limit_s, extra, keep
        self._stateful = stateful
        self._ask = SaveRequest.NOTHING
        self._signal = 0
        self._steps = 0  # since the last point
        self._points = 0  # safe points so far
        self._goal = 0  # the safe point at which all ranks save, or have saved
        self._group = process_group_of(optimizer, prepared_of(model))
        self._flag = SharedFlag.of(self._group)
        self._pid = os.getpid()
        self._is_closed = False
        self._inner = innermost(optimizer)  # accelerate's wrapper of an optimizer has no hooks
        _refuse_second()
        self._hook = self._inner.register_step_post_hook(self._after_step)
        # Not a pipe: forked children inherit it, and a socket's messages name their sender.
        self._from, self._to = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if hasattr(socket, "SO_PASSCRED"):
            self._from.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._to.setblocking(False)
        self._watcher = threading.Thread(
            target=_watch, args=(self._from, self._signals, limit_s), daemon=True
        )
        self._watcher.start()
        # Python's C handler writes there at once, even during a long computation in a library.
        self._wakeup_before = signal.set_wakeup_fd(self._to.fileno(), warn_on_full_buffer=False)
        if self._wakeup_before != -1:  # that of an event loop; `_note` writes instead
            signal.set_wakeup_fd(self._wakeup_before)
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        _OPEN.append(self)

    # --- signals ----------------------------------------------------------------------------------

    def _note(self, number: int, frame: object) -> None:
        """Note the signal. This is the handler: it runs in the main thread, between any two
        bytecode instructions.
        """
        if os.getpid() != self._pid:  # a library forked without Python's os.fork hooks
            if number not in GOES_ON:
                os._exit(128 + number)
            return
        if self._wakeup_before != -1:
            with suppress(OSError):
                self._to.send(bytes([number]))
        self._is_taken(number)

    def _is_taken(self, number: int) -> bool:
        """Note the signal, if it asks for more than the one before; return whether it does."""
        wanted = SaveRequest.SAVE if number in GOES_ON else SaveRequest.END
        if wanted <= self._ask:
            return False
        self._ask, self._signal = wanted, number
        return True

    # --- safe points ------------------------------------------------------------------------------

    def _after_step(self, *_: object) -> None:
        if not self._stateful:
            self._act()
            return
        self._steps += 1
        if self._steps > 2:  # not 1: this may have been constructed in the middle of an iteration
            names = ", ".join(self._stateful)
            raise StateError(
                f"save_on_signal: {names} must be saved after its own step: call point() of what "
                "save_on_signal returned at the end of every iteration"
            )

    def point(self) -> None:
        """Save here if a signal has arrived. Call it where all objects to be saved belong to the
        same step.
        """
        self._steps = 0
        self._act()

    def _act(self) -> None:
        if self._is_closed or (self._flag is not None and not self._is_heard(self._flag)):
            return
        if self._ask not in (SaveRequest.SAVE, SaveRequest.END):
            return
        asked, number = self._ask, self._signal
        self._ask = SaveRequest.NOTHING if asked is SaveRequest.SAVE else SaveRequest.ENDING
        name = signal.Signals(number).name
        try:
            if self._stateful and self._steps:
                raise StateError(
                    "a step came after the last point(), so the saved objects would not match"
                )
            path = self._save()
            LOG.info("%s: saved %s", name, path)
        except Exception as error:
            _tell(f"{name}: nothing was saved: {error}")
            if asked is SaveRequest.SAVE and is_wrapped(self._inner):
                self._inner._offload_session.metrics.note(f"save on {name}", f"failed: {error}")
        if asked is SaveRequest.END:
            raise SystemExit(128 + number)

    def _is_heard(self, flag: SharedFlag) -> bool:
        """Return whether all ranks save at this safe point."""
        self._points += 1
        if self._points <= self._goal:
            return self._points == self._goal
        if self._ask in (SaveRequest.SAVE, SaveRequest.END):
            flag.ring({"signal": self._signal, "point": self._points + 1})
        said = flag.heard()
        if said is None or self._ask is SaveRequest.ENDING:
            return False
        number = int(said["signal"])
        if self._is_taken(number):  # another rank has received it
            self._to.send(bytes([number]))  # the limit applies to this rank, too
        if self._points < int(said["point"]):
            return False
        # Without collectives ranks may be at different points: all save at the last of these.
        rank_group = RankGroup.gather("save_on_signal", self._group)
        try:
            last = int(max(rank_group.by_consensus("points", lambda: self._points)))
        finally:
            rank_group.leave()
        flag.next_round()
        self._goal = last
        return self._points == last

    def _save(self) -> Any:
        try:
            await_saves([self._model, self._inner])
        except StateError as error:  # of an earlier save: this one is made all the same
            _tell(str(error))
        extra = self._extra() if callable(self._extra) else self._extra
        return save(
            Path(self._path()) if callable(self._path) else free_path(Path(self._path)),
            self._model,
            self._optimizer,
            extra=extra,
            keep=self._keep,
            **self._stateful,
        )

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Restore the previous handlers. Idempotent. If the process is ending, its limit stays in
        force.
        """
        if self._is_closed:
            return
        _check_thread()
        self._is_closed = True
        with suppress(ValueError):
            _OPEN.remove(self)
        self._hook.remove()
        if self._ask in (SaveRequest.END, SaveRequest.ENDING):
            return
        self._give_back()
        self._to.shutdown(socket.SHUT_WR)  # ends the thread
        self._watcher.join()
        self._to.close()

    def _give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._wakeup_before == -1:
            signal.set_wakeup_fd(-1)

    def _leave_to_parent(self) -> None:
        """Restore the previous handlers in a forked child."""
        self._is_closed = True
        with suppress(ValueError):
            self._give_back()
        self._from.close()
        self._to.close()

    def __enter__(self) -> save_on_signal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._act()
        finally:
            self.close()


# --- one in a process -----------------------------------------------------------------------------

_OPEN: list[save_on_signal] = []


def _refuse_second() -> None:
    if _OPEN:
        raise StateError(
            "save_on_signal: there is one already, and a signal has one handler; close() it first, "
            "or give it all there is to save by name: save_on_signal(path, model, optimizer, "
            "other=model2, other_optimizer=optimizer2)"
        )


def _forget_in_child() -> None:
    while _OPEN:
        _OPEN.pop()._leave_to_parent()


os.register_at_fork(after_in_child=_forget_in_child)


# --- the thread -----------------------------------------------------------------------------------


def _watch(messages: socket.socket, signals: Sequence[int], limit_s: float) -> None:
    """Wait for a signal after which the process ends, and then enforce the limit."""
    with messages:
        while data := _received(messages):
            ends = [number for number in data if number in signals and number not in GOES_ON]
            if ends:
                _see_to_the_limit(ends[0], limit_s)


def _received(messages: socket.socket) -> bytes:
    """Return the numbers of signals that this process has received; empty: the socket is shut down.
    Messages of forked children are dropped.
    """
    while True:
        data, about, _, _ = messages.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        senders = [_CREDENTIALS.unpack(each)[0] for *_, each in about]
        if not data or all(sender == os.getpid() for sender in senders):
            return data


def _see_to_the_limit(number: int, limit_s: float) -> None:
    grace_s = min(_GRACE * limit_s, _MOST_GRACE_S)
    time.sleep(limit_s - grace_s)
    name = signal.Signals(number).name
    _tell(f"{name}: no safe point or no save within {limit_s:g} s: nothing was saved by it")
    cancel_all(SystemExit(128 + number))  # all saves in progress, in any thread
    time.sleep(grace_s)
    os._exit(128 + number)


def _tell(what: str) -> None:
    """Log and write to stderr directly: the usual stream may be closed, full or locked by another
    thread.
    """
    LOG.error("%s", what)
    with suppress(OSError):
        os.write(2, f"offload: {what}\n".encode(errors="replace"))


def _checked(signals: Sequence[int], limit_s: float) -> tuple[int, ...]:
    _check_thread()
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < 1e6:
        raise ConfigError(f"limit_s: expected seconds above 0, got {limit_s!r}")
    try:
        found = tuple(signal.Signals(number) for number in signals)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"signals: expected numbers of signals, got {signals!r}") from error
    if not found or {signal.SIGKILL, signal.SIGSTOP} & set(found):
        raise ConfigError(f"signals: expected some that can be handled, got {signals!r}")
    return found


def _check_save(
    path: Any, model: nn.Module, extra: Any, keep: int | None, stateful: Mapping[str, Any]
) -> None:
    """Raise now the errors that every save would raise, not when the signal arrives."""
    if not callable(path) and not isinstance(path, str | PathLike):
        raise ConfigError(f"path: expected a path or a function, got {type(path).__name__}")
    check_arguments("later" if callable(path) else check_path(path), model, keep, stateful)
    if not callable(extra):
        SavedTreeTensors().encode("extra", extra)


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise StateError("save_on_signal: only the main thread gets signals; call it there")
