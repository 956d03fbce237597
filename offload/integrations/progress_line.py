"""A progress line around the loader of an unchanged training loop."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

import torch
from torch import Tensor

from offload.api import report
from offload.core.config import format_size
from offload.core.errors import ConfigError, StateError
from offload.core.log import LOG
from offload.device.accelerator import used_bytes
from offload.distributed.group import place_of
from offload.integrations.screen import LinePart, StatusLine, find_screen, fit
from offload.telemetry.report import Report, count_tokens_of
from offload.telemetry.words import Writer, below, check_writer, log_numbers, show_seconds

_T = TypeVar("_T")
_WINDOW = 24  # latest lines or logs over which speeds are averaged


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
    """Iterate over the batches of `loader` and show a line between them: step, loss, tokens per
    second, the median time of an iteration, the share of it spent waiting for drives, copies and
    ranks, bytes in each tier, time left. Speed and waits are those since the last line, as the
    report has them for the whole run. Numbers that only the loop knows are given by `set(loss=...)`
    of the object returned.

    optimizer: a wrapped optimizer, or a prepared model; None for training without offload: the line
    then has no tiers. file: where to write instead of standard error; in a notebook, without
    `file`, the line is an output of the cell. In a terminal or notebook the line is overwritten, at
    most every `every_s` seconds; elsewhere there is a new line, at most every ten seconds. Among
    several ranks only the first one shows it and logs.

    tokens: the number in each batch, or a function of the batch; by default it is found in
    `input_ids` and in integer tensors of two dimensions, padding included. start: steps that were
    done before, by a run that is resumed. total: steps in all, if the loader does not tell its
    length. log_to: a SummaryWriter of TensorBoard or a run of W&B, for all numbers of the report
    and the loop's own, every `log_every` steps and at the end.
    """
    _check(every_s, tokens, start, log_every)
    if optimizer is not None:
        report(optimizer)  # refuses an optimizer that is not wrapped, before the first step
    if log_to is not None:
        check_writer(log_to, "progress: log_to")
    place = place_of(None)
    is_first = place is None or place[0] == 0
    screen = find_screen(file, every_s, _screen_failed) if is_first else StatusLine(None)
    if total is None:
        length = length_hint(loader, -1)  # a loader that streams has no length
        total = None if length < 0 else start + length
    writer = log_to if is_first else None
    return Progress(loader, optimizer, screen, tokens, start, total, writer, log_every)


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


class _DonePoint(NamedTuple):
    """A point in time, and the steps and tokens done by then."""

    at_s: float
    done: int
    tokens: int


@dataclass(eq=False, repr=False)
class Progress(Generic[_T]):
    """An iterator over the batches of one loader, for one pass; another `iter()` after its end
    raises `StateError`. A step counts as done when the next batch is requested. For the training
    thread only.
    """

    _loader: Iterable[_T]
    _optimizer: Any
    _screen: StatusLine
    _tokens_of: int | Callable[[_T], int] | None
    _start: int
    _total: int | None
    _writer: Writer | None
    _log_every: int

    def __post_init__(self) -> None:
        self._device = _device_of(self._optimizer)
        self._batches: Iterator[_T] | None = None  # None: no batch has been requested yet
        self._is_over = False
        self._numbers: dict[str, Any] = {}  # set by the loop; tensors are not read yet
        self._done = 0
        self._tokens: int | None = 0  # None: not known
        self._points: deque[_DonePoint] = deque(maxlen=_WINDOW)
        self._shown_done = self._logged_done = 0
        self._steps_seen = 0  # optimizer steps when the last line was shown
        # Ends the line also if the loop is left early or by an exception.
        self._end = weakref.finalize(self, self._screen.end)

    def set(self, **numbers: Any) -> None:
        """Set numbers that the loop knows, which the line shows; `loss` comes first. Tensors of one
        element are not read before a line is written, so the loop waits for a device no more often
        than that.
        """
        for name, value in numbers.items():
            self._numbers[name] = _as_told(name, value)

    def __iter__(self) -> Progress[_T]:
        if self._is_over:  # an empty pass would be an epoch that silently trains nothing
            raise StateError(
                "progress: it is exhausted, and shows one pass over a loader; make another "
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
            if found and self._optimizer is not None:
                count_tokens_of(self._optimizer, found)
        return batch

    def close(self) -> None:
        """Show the last step and end the line; idempotent. The end of the loader does it, too."""
        if not self._is_over:
            self._is_over = True
            self._tell(is_last=True)
        self._end()

    def _tell(self, is_last: bool) -> None:
        """Show a line and log the numbers, each if it is due."""
        now_s, is_due = time.monotonic(), is_last or self._done % self._log_every == 0
        shows = self._done > self._shown_done and (is_last or self._screen.is_due)
        logs = self._writer is not None and is_due and self._done > self._logged_done
        if not shows and not logs:
            return
        told = None if self._optimizer is None else report(self._optimizer)
        live = {} if told is None else told.live_numbers(self._steps_seen)
        numbers = {name: float(value) for name, value in self._numbers.items()}
        self._points.append(_DonePoint(now_s, self._done, self._tokens or 0))
        if shows:
            self._shown_done = self._done
            self._steps_seen = told.steps if told is not None else 0
            self._screen.show(fit(self._parts(live, numbers), self._screen.width))
        if logs:
            self._logged_done = self._done
            self._write(told, live, numbers)

    def _speed(self) -> tuple[float, float | None]:
        """Return the average seconds of a batch of late, and tokens per second; None: not known."""
        first, last = self._points[0], self._points[-1]
        spent_s = max(last.at_s - first.at_s, 1e-9)
        tokens = None if not self._tokens else (last.tokens - first.tokens) / spent_s
        return spent_s / max(1, last.done - first.done), tokens

    def _parts(self, live: Mapping[str, float], numbers: Mapping[str, float]) -> list[LinePart]:
        (batch_s, tokens_per_s), done = self._speed(), self._start + self._done
        parts = [LinePart(f"step {done}" + (f"/{self._total}" if self._total else ""), 0)]
        if "loss" in numbers:
            parts.append(LinePart(f"loss {numbers['loss']:.4g}", 1))
        if tokens_per_s is not None:
            of_engine = live.get("tokens_per_s", tokens_per_s)
            parts.append(LinePart(f"{of_engine:,.0f} tokens/s", 2))
        parts.append(LinePart(_step_time(live, batch_s), 6))
        if "stall_share" in live:
            parts.append(LinePart(f"waiting {live['stall_share']:.0%}", 3))
        if live:
            parts.append(LinePart(_tiers(live, self._device), 4))
        if self._total and self._total > done:
            parts.append(LinePart(f"{_clock((self._total - done) * batch_s)} left", 5))
        others = (item for item in numbers.items() if item[0] != "loss")
        return parts + [LinePart(f"{name} {value:.4g}", 7) for name, value in others]

    def _write(
        self, told: Report | None, live: Mapping[str, float], numbers: Mapping[str, float]
    ) -> None:
        """Log the report's numbers, those of the line, and the loop's own."""
        assert self._writer is not None
        batch_s, tokens_per_s = self._speed()
        ours = {"seconds_per_step": batch_s, "tokens_per_s": tokens_per_s}
        ours |= {**(told.to_dict() if told is not None else {}), **live}
        both = {**below("offload", ours), **below("train", numbers)}
        log_numbers(self._writer, both, self._start + self._done)


def _screen_failed(error: Exception) -> None:
    """Warn of a terminal or file that is closed: it is no reason to end the training."""
    LOG.warning("progress: the line cannot be shown, and is not tried again: %s", error)


def count_tokens(batch: Any, told: int | Callable[[Any], int] | None = None) -> int | None:
    """Return the number of tokens in a batch: as told, else the size of `input_ids`, or of an
    integer tensor with two dimensions, alone or first of several. None: not known. Reads no
    element.
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
    """Check and return a number, or a tensor of one element, detached so that it holds no graph."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        got = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(
            f"progress: set({name}=...): expected a number or a tensor of one element, got {got}"
        )
    return value


def _device_of(optimizer: Any) -> torch.device | None:
    """Return the device of a plain optimizer's parameters; None: they are on the CPU, or
    not known.
    """
    groups = getattr(optimizer, "param_groups", ())
    params = (param for group in groups for param in group["params"])
    return next((p.device for p in params if p.device.type not in ("cpu", "meta")), None)


def _step_time(live: Mapping[str, float], batch_s: float) -> str:
    """Format the time of an iteration as the report does; before there is one, that of a batch."""
    iteration_s = live.get("iteration_seconds")
    if iteration_s is None:
        return f"{batch_s:.2f} s/step"
    return f"{show_seconds(iteration_s)} an iteration"


def _tiers(live: Mapping[str, float], device: torch.device | None) -> str:
    sampled = live.get("device_bytes")
    on_device = used_bytes(device) if sampled is None and device is not None else sampled
    tiers = {"device": on_device, "host": live["host_bytes"], "disk": live["disk_bytes"]}
    return ", ".join(f"{k} {format_size(int(n))}" for k, n in tiers.items() if n is not None)


def _clock(seconds: float) -> str:
    """Format as h:mm:ss, or m:ss for less than an hour."""
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
