"""A line that tells how training goes, around the loader of a loop that stays as it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import Any, TextIO, TypeVar

from offload.api import report
from offload.config import format_size
from offload.reports import Report

_T = TypeVar("_T")
_EVERY_S = 10.0  # between lines where a line cannot be written over
_WIDTH = 100


def progress(
    loader: Iterable[_T], optimizer: Any, *, every_s: float = 0.5, file: TextIO | None = None
) -> Iterator[_T]:
    """The batches of `loader`, with a line on `file` (standard error) between them: steps, seconds
    a step, what waits, bytes on each tier. On a terminal the line is written over at most every
    `every_s` seconds; elsewhere there is a new one every ten seconds. optimizer: a wrapped one, or
    a prepared model.
    """
    out = file or sys.stderr
    is_terminal = out.isatty()
    total = length_hint(loader, -1)  # a loader of a stream has no length
    begin_s, told_s, done = time.monotonic(), float("-inf"), 0
    for batch in loader:
        yield batch
        done += 1
        now_s = time.monotonic()
        if now_s - told_s >= (every_s if is_terminal else _EVERY_S):
            told_s = now_s
            _tell(out, is_terminal, _line(report(optimizer), done, total, now_s - begin_s))
    if done:
        _tell(out, is_terminal, _line(report(optimizer), done, total, time.monotonic() - begin_s))
        if is_terminal:
            out.write("\n")
            out.flush()


def _tell(out: TextIO, is_terminal: bool, line: str) -> None:
    out.write(f"\r{line:<{_WIDTH}}" if is_terminal else f"{line}\n")
    out.flush()


def _line(told: Report, done: int, total: int, spent_s: float) -> str:
    parts = [f"step {done}" if total < 0 else f"step {done}/{total}"]
    parts.append(f"{spent_s / done:.2f} s/step")
    parts.append(f"step() {told.last.step_s:.2f} s")
    model = told.model
    if model is not None and model.stall_share is not None:
        parts.append(f"waiting for parameters {model.stall_share:.0%}")
    on_disk = told.plan.disk_bytes
    in_memory = told.plan.resident_bytes
    if model is not None:
        in_memory += model.held_bytes
        on_disk = model.disk_bytes
    parts.append(f"host {format_size(in_memory)}, disk {format_size(on_disk)}")
    return " | ".join(parts)
