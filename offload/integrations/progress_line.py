"""A line that tells how training goes, around the loader of a loop that stays as it is."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

import torch
from torch import Tensor

from offload.api import report
from offload.core.config import format_size
from offload.core.errors import ConfigError, StateError
from offload.core.log import LOG
from offload.device import used_bytes
from offload.distributed import place_of
from offload.integrations.screen import NoScreen, Screen, find_screen
from offload.telemetry.live_stats import LiveStats
from offload.telemetry.loggers import Writer, check_writer, log_numbers
from offload.telemetry.report import Report

_T = TypeVar("_T")
_WINDOW = 24  # lines over which speeds are averaged


def progress(
    loader: Iterable[_T],
    optimizer: Any,
    *,
    every_s: float = 0.5,
    file: TextIO | None = None,
    tokens: int | Callable[[_T], int] | None = None,
    start: int = 0,
    total: int | None = None,
    log_to: Writer | None = None,
    log_every: int = 10,
) -> Progress[_T]:
    """The batches of `loader`, with a line between them: step, loss, tokens a second, seconds a
    step, the share of time that is waited for drives, copies and ranks, bytes on each tier, time
    left. What only the loop knows it says by `set(loss=...)` of what this returns.

    optimizer: a wrapped one, or a prepared model; None for training without offload: the line then
    has no tiers. file: instead of standard error; in a notebook without it the line is an output
    of the cell. A terminal's line is written over, at most every `every_s` seconds; elsewhere there
    is a new one every ten seconds. Among several ranks the first one tells.

    tokens: in each batch, or a function of the batch; found by itself in `input_ids` and in whole
    numbers of two dimensions, padding included. start: steps that were done before, by a run that
    is resumed. total: steps in all, where the loader does not tell its length. log_to: a
    SummaryWriter of TensorBoard or a run of W&B, for all numbers of the report and the loop's own,
    every `log_every` steps and at the end.
    """
    _check(every_s, tokens, start, log_every)
    if optimizer is not None:
        report(optimizer)  # refuses what is not ours, before the first step
    if log_to is not None:
        check_writer(log_to, "progress: log_to")
    place = place_of(None)
    is_first = place is None or place[0] == 0
    screen = find_screen(file, every_s) if is_first else NoScreen()
    if total is None:
        length = length_hint(loader, -1)  # a loader of a stream has no length
        total = None if length < 0 else start + length
    log = _Log(log_to, log_every) if log_to is not None and is_first else None
    return Progress(loader, optimizer, screen, tokens, start, total, log)


def _check(every_s: float, tokens: object, start: int, log_every: int) -> None:
    for name, value, least in (("start", start, 0), ("log_every", log_every, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"progress: {name}: expected at least {least}, got {value!r}")
    if not every_s >= 0:
        raise ConfigError(f"progress: every_s: expected seconds, at least 0, got {every_s!r}")
    if tokens is not None and not callable(tokens) and not isinstance(tokens, int):
        raise ConfigError(
            f"progress: tokens: expected how many are in a batch, or a function of the batch, got "
            f"{tokens!r}"
        )


class _Log(NamedTuple):
    writer: Writer
    every: int  # steps


class _DonePoint(NamedTuple):
    """What was done by when."""

    at_s: float
    done: int
    tokens: int


class _LinePart(NamedTuple):
    """Of the line. rank: where there is no room for all, those with the lowest come first."""

    text: str
    rank: int


class _Speed(NamedTuple):
    """Lately. tokens_per_s: None: not known."""

    step_s: float
    tokens_per_s: float | None


class Progress(Generic[_T]):
    """An iterator over the batches of one loader, once; a second time is a `StateError`. A step
    counts as done when the next batch is asked for. For the thread that trains.
    """

    def __init__(
        self,
        loader: Iterable[_T],
        optimizer: Any,
        screen: Screen,
        tokens: int | Callable[[_T], int] | None,
        start: int,
        total: int | None,
        log: _Log | None,
    ) -> None:
        self._loader, self._optimizer, self._screen = loader, optimizer, screen
        self._device = _device_of(optimizer)
        self._tokens_of, self._start, self._total, self._log = tokens, start, total, log
        self._batches: Iterator[_T] | None = None  # None: nobody has asked yet
        self._is_over = False
        self._numbers: dict[str, Any] = {}  # what the loop has set, not looked at yet
        self._done = 0
        self._tokens: int | None = 0  # None: not known
        self._points: deque[_DonePoint] = deque(maxlen=_WINDOW)
        self._shown_s, self._shown_done, self._logged_done = float("-inf"), 0, 0
        self._steps_seen = 0  # of the optimizer, when the last line was shown
        # A loop that is left early, or by an exception, leaves no open line.
        self._end = weakref.finalize(self, screen.end)

    def set(self, **numbers: Any) -> None:
        """Numbers that the loop knows, the loss first of all. Tensors of one element are not looked
        at before a line is written, so a device is not waited for more often than that.
        """
        for name, value in numbers.items():
            self._numbers[name] = _as_told(name, value)

    def __iter__(self) -> Progress[_T]:
        if self._is_over:  # an empty pass would be an epoch that trains nothing, without a word
            raise StateError(
                "progress: it has come to its end, and shows one pass over a loader; make another "
                "for the next pass: for batch in offload.progress(loader, optimizer, start=...)"
            )
        return self

    def __next__(self) -> _T:
        if self._is_over:
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self._loader)
            self._points.append(_DonePoint(time.monotonic(), 0, 0))
        else:
            self._done += 1
            self._tell(is_last=False)
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            raise
        if self._tokens is not None:
            found = count_tokens(batch, self._tokens_of)
            self._tokens = None if found is None else self._tokens + found
        return batch

    def close(self) -> None:
        """Show how far it has come, and end the line. The end of the loader does it, too."""
        if not self._is_over:
            self._is_over = True
            self._tell(is_last=True)
        self._end()

    def _tell(self, is_last: bool) -> None:
        """What is due: a line, the numbers for a log, both or nothing."""
        now_s, log = time.monotonic(), self._log
        shows = self._done > self._shown_done and (
            is_last or now_s - self._shown_s >= self._screen.every_s
        )
        logs = log is not None and self._done > self._logged_done
        logs = logs and (is_last or self._done % log.every == 0)  # type: ignore[union-attr]
        if not shows and not logs:
            return
        told = None if self._optimizer is None else report(self._optimizer)
        live_stats = None if told is None else LiveStats.of(told, self._steps_seen)
        numbers = {name: float(value) for name, value in self._numbers.items()}
        self._points.append(_DonePoint(now_s, self._done, self._tokens or 0))
        if shows:
            self._shown_s, self._shown_done = now_s, self._done
            self._steps_seen = live_stats.steps if live_stats else 0
            self._show(self._parts(live_stats, numbers))
        if logs:
            self._logged_done = self._done
            self._write(told, live_stats, numbers)

    def _show(self, parts: list[_LinePart]) -> None:
        """A terminal that has gone away is no reason to end a training."""
        try:
            self._screen.show(parts)
        except (OSError, ValueError) as error:  # ValueError: a file that was closed
            self._end.detach()
            self._screen = NoScreen()
            LOG.warning("progress: the line cannot be shown, and is not tried again: %s", error)

    def _speed(self) -> _Speed:
        first, last = self._points[0], self._points[-1]
        spent_s = max(last.at_s - first.at_s, 1e-9)
        tokens = None if not self._tokens else (last.tokens - first.tokens) / spent_s
        return _Speed(spent_s / max(1, last.done - first.done), tokens)

    def _parts(self, live_stats: LiveStats | None, numbers: Mapping[str, float]) -> list[_LinePart]:
        speed, done = self._speed(), self._start + self._done
        parts = [_LinePart(f"step {done}" + (f"/{self._total}" if self._total else ""), 0)]
        if "loss" in numbers:
            parts.append(_LinePart(f"loss {numbers['loss']:.4g}", 1))
        if speed.tokens_per_s is not None:
            parts.append(_LinePart(f"{speed.tokens_per_s:,.0f} tokens/s", 2))
        parts.append(_LinePart(f"{speed.step_s:.2f} s/step", 6))
        if live_stats is not None:
            if live_stats.stall_share is not None:
                parts.append(_LinePart(f"waiting {live_stats.stall_share:.0%}", 3))
            parts.append(_LinePart(_tiers(live_stats, self._device), 4))
        if self._total and self._total > done:
            parts.append(_LinePart(f"{_clock((self._total - done) * speed.step_s)} left", 5))
        others = (item for item in numbers.items() if item[0] != "loss")
        return parts + [_LinePart(f"{name} {value:.4g}", 7) for name, value in others]

    def _write(
        self, told: Report | None, live_stats: LiveStats | None, numbers: Mapping[str, float]
    ) -> None:
        """To the log: the report's numbers, those of the line, and the loop's own."""
        assert self._log is not None
        speed = self._speed()
        ours: dict[str, Any] = told.to_dict() if told is not None else {}
        ours |= live_stats.to_dict() if live_stats is not None else {}
        ours["seconds_per_step"] = speed.step_s
        if speed.tokens_per_s is not None:
            ours["tokens_per_s"] = speed.tokens_per_s
        plain = {f"offload/{k}": v for k, v in ours.items() if isinstance(v, int | float)}
        own = {f"train/{name}": value for name, value in numbers.items()}
        log_numbers(self._log.writer, {**plain, **own}, self._start + self._done)


def count_tokens(batch: Any, told: int | Callable[[Any], int] | None = None) -> int | None:
    """In a batch: as told, else what is in `input_ids`, or in a tensor of whole numbers with two
    dimensions, alone or first of several. None: not known. Reads no element.
    """
    if told is not None:
        return int(told(batch)) if callable(told) else told
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) else None
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(first, Tensor) or first.dim() != 2:
        return None
    is_whole = not (first.is_floating_point() or first.is_complex() or first.dtype is torch.bool)
    return first.numel() if is_whole else None


def _as_told(name: str, value: Any) -> Any:
    """A number, or a tensor that is one; it holds no graph."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        got = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(
            f"progress: set({name}=...): expected a number or a tensor of one element, got {got}"
        )
    return value


def _device_of(optimizer: Any) -> torch.device | None:
    """Where plain parameters are; None: on the CPU, or not to be seen."""
    groups = getattr(optimizer, "param_groups", ())
    params = (param for group in groups for param in group["params"])
    return next((p.device for p in params if p.device.type not in ("cpu", "meta")), None)


def _tiers(live_stats: LiveStats, device: torch.device | None) -> str:
    on_device = live_stats.device_bytes
    if on_device is None and device is not None:
        on_device = used_bytes(device)
    tiers = {"device": on_device, "host": live_stats.host_bytes, "disk": live_stats.disk_bytes}
    return ", ".join(f"{k} {format_size(n)}" for k, n in tiers.items() if n is not None)


def _clock(seconds: float) -> str:
    """h:mm:ss, or m:ss for less than an hour."""
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
