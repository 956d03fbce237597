"""Signals that ask a training to save: before its time is over, or at its end.

A handler only notes the signal. The save happens at a safe point: the end of `optimizer.step()`,
or `point()` where other objects are saved, too, whose turn comes after the step. A thread that was
there from the beginning sees to the limit, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.api import save
from offload.checkpoint.saving import cancel_all
from offload.errors import ConfigError, StateError
from offload.log import LOG

GOES_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # after these training goes on
_GRACE = 0.2  # share of the limit that is left for removing a save that was cancelled
_MOST_GRACE_S = 2.0


class Ask(Enum):
    NOTHING = "nothing"  # no signal yet
    SAVE = "save"  # save, and go on
    END = "end"  # save, and end
    ENDING = "ending"  # has saved, or could not


MOVES = {
    Ask.NOTHING: {Ask.SAVE, Ask.END},
    Ask.SAVE: {Ask.NOTHING, Ask.END},
    Ask.END: {Ask.ENDING},
    Ask.ENDING: set(),
}


class save_on_signal:
    """Save `model` and `optimizer` when one of `signals` comes, as `offload.save` does. Until
    `close()`, or used as `with offload.save_on_signal(...) as saver:`. In the main thread.

    After SIGUSR1 and SIGUSR2 training goes on; after any other signal (SIGTERM) the process ends
    with exit code 128 + the signal's number, `limit_s` seconds after it at the latest. A step or
    save that is under way comes to its end first. What cannot be saved within the limit is
    cancelled and removed; older checkpoints are as they were.

    path: of the new checkpoint; where it is there already, `<path>-2`, `<path>-3`, ... or a
    function that returns one. extra: plain values, or a function that returns them at the save.
    stateful: as in `offload.save`. With any (a scheduler steps after the optimizer), call
    `saver.point()` at the end of every iteration: that is where it saves.
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
        if not callable(path) and not isinstance(path, str | PathLike):
            raise ConfigError(f"path: expected a path or a function, got {type(path).__name__}")
        self._path, self._model, self._optimizer = path, model, optimizer
        self._limit_s, self._extra, self._keep = limit_s, extra, keep
        self._stateful = stateful
        self._ask = Ask.NOTHING
        self._signal = 0
        self._steps = 0  # since the last point
        self._pid = os.getpid()
        self._is_closed = False
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._from, self._to = os.pipe()
        os.set_blocking(self._to, False)
        self._guard = threading.Thread(
            target=_watch, args=(self._from, self._signals, limit_s), daemon=True
        )
        self._guard.start()
        # The system's handler writes there at once, even while some library computes for long.
        self._wakeup_before = signal.set_wakeup_fd(self._to, warn_on_full_buffer=False)
        if self._wakeup_before != -1:  # an event loop has its own; then the handler tells
            signal.set_wakeup_fd(self._wakeup_before)
        self._before = {number: signal.signal(number, self._note) for number in self._signals}

    # --- signals ----------------------------------------------------------------------------------

    def _note(self, number: int, frame: object) -> None:
        """The handler. In the main thread, between any two instructions of anything."""
        if os.getpid() != self._pid:  # a worker of a loader, forked from here
            if number not in GOES_ON:
                os._exit(128 + number)
            return
        if self._wakeup_before != -1:
            os.write(self._to, bytes([number]))
        wanted = Ask.SAVE if number in GOES_ON else Ask.END
        if wanted in MOVES[self._ask]:
            self._ask = wanted
            self._signal = number

    # --- safe points ------------------------------------------------------------------------------

    def _after_step(self, *_: object) -> None:
        if not self._stateful:
            self._act()
            return
        self._steps += 1
        if self._steps > 2:  # two: it may have been made in the middle of an iteration
            names = ", ".join(self._stateful)
            raise StateError(
                f"save_on_signal: {names} must be saved after its own step: call point() of what "
                "save_on_signal returned at the end of every iteration"
            )

    def point(self) -> None:
        """Save here if a signal has come. Everything that is saved belongs to the same step."""
        self._steps = 0
        self._act()

    def _act(self) -> None:
        if self._ask not in (Ask.SAVE, Ask.END) or self._is_closed:
            return
        asked, number = self._ask, self._signal
        self._ask = Ask.NOTHING if asked is Ask.SAVE else Ask.ENDING
        try:
            path = self._save()
            LOG.info("%s: saved %s", signal.Signals(number).name, path)
        except Exception as error:
            if asked is Ask.SAVE:
                raise
            LOG.error("%s: nothing was saved: %s", signal.Signals(number).name, error)
        if asked is Ask.END:
            raise SystemExit(128 + number)

    def _save(self) -> Any:
        extra = self._extra() if callable(self._extra) else self._extra
        return save(
            self._new_path(),
            self._model,
            self._optimizer,
            extra=extra,
            keep=self._keep,
            **self._stateful,
        )

    def _new_path(self) -> Path:
        if callable(self._path):
            return Path(self._path())
        path, count = Path(self._path), 1
        while os.path.lexists(path):
            count += 1
            path = Path(f"{self._path}-{count}")
        return path

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Handlers are as before. Idempotent. A process that is ending keeps its limit."""
        if self._is_closed:
            return
        _check_thread()
        self._is_closed = True
        self._hook.remove()
        if self._ask in (Ask.END, Ask.ENDING):
            return
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._wakeup_before == -1:
            signal.set_wakeup_fd(-1)
        os.close(self._to)  # ends the thread
        self._guard.join()

    def __enter__(self) -> save_on_signal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _watch(fd: int, signals: Sequence[int], limit_s: float) -> None:
    """The thread: waits for a signal after which the process ends, then for the limit."""
    try:
        while data := os.read(fd, 64):
            ends = [number for number in data if number in signals and number not in GOES_ON]
            if ends:
                _see_to_the_limit(ends[0], limit_s)
    finally:
        os.close(fd)


def _see_to_the_limit(number: int, limit_s: float) -> None:
    grace_s = min(_GRACE * limit_s, _MOST_GRACE_S)
    time.sleep(limit_s - grace_s)
    name = signal.Signals(number).name
    LOG.error("%s: no safe point or no save within %g s: the process ends", name, limit_s)
    cancel_all(SystemExit(128 + number))  # in whatever thread saves
    time.sleep(grace_s)
    os._exit(128 + number)


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


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise StateError("save_on_signal: only the main thread gets signals; call it there")
