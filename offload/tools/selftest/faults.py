"""Checks of disk faults: the result is the right bytes or a typed error, and old bytes survive.

The I/O engines inject the faults themselves (`IOEngine.inject`), so that all code above them runs
as in production. An operation that never completes keeps its memory and its file until the process
ends, by design.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.core.errors import (
    ConfigError,
    CorruptionError,
    OffloadError,
    StateError,
    StoreError,
    StoreTimeout,
)
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind
from offload.tools.selftest.check import NotRun, PassedCheck, Setting, require, require_error
from offload.tools.selftest.model import adamw
from offload.tools.selftest.wrap import parameters, take_step, tensors, tight

Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES = 16 << 10
_SIZES = {
    "layer.0": 4 * _PIECE_BYTES,
    "layer.1": 3 * _PIECE_BYTES + 100,
    "layer.2": _PIECE_BYTES - 1,
    "layer.3": 1,
}
_OPERATIONS = 10  # pieces of all chunks: the positions a fault can have
_HEALTHY = Fault(FaultKind.NONE)
_DEADLINE_S, _SHORT_DEADLINE_S, _HANG_S = 20.0, 0.5, 60.0


@dataclass(frozen=True)
class Kind:
    """A kind of fault. fails: the error to which a single faulty operation leads; None: the store
    recovers, or a silent fault is found when the bytes are read.
    """

    name: str
    fault: FaultKind
    code: int = 0
    fails: type[StoreError] | None = None
    is_silent: bool = False  # in a write: not noticed before the bytes are read
    may_last: bool = True  # False: takes too long until the retries are exhausted, or never fails

    def at(self, nth: int, forever: bool) -> Fault:
        return Fault(self.fault, nth, forever, self.code, seed=977 * nth)


KINDS = (
    Kind("EIO", FaultKind.ERROR, errno.EIO, StoreError),
    Kind("ENOSPC", FaultKind.ERROR, errno.ENOSPC, StoreError),
    Kind("EAGAIN", FaultKind.ERROR, errno.EAGAIN, may_last=False),
    Kind("EINTR", FaultKind.ERROR, errno.EINTR, may_last=False),
    Kind("short", FaultKind.SHORT_HALF, may_last=False),
    Kind("empty", FaultKind.SHORT_ZERO, may_last=False),
    Kind("flipped bit", FaultKind.FLIP, 0, CorruptionError, is_silent=True),
    Kind("lost write", FaultKind.LOST_WRITE, is_silent=True),
    Kind("delay", FaultKind.DELAY, 3),
)
LOST_COMPLETION = Kind("lost completion", FaultKind.LOST_COMPLETION, 0, StoreTimeout)


# --- the store ------------------------------------------------------------------------------------


def _engine(setting: Setting, engine: str) -> PassedCheck:
    places = (1, 6) if setting.is_quick else range(1, _OPERATIONS + 1)
    faults = [
        (kind, nth, is_write, forever)
        for kind in KINDS
        for nth, forever in [*((n, False) for n in places), *([(2, True)] if kind.may_last else [])]
        for is_write in (True, False)
    ]
    trial = _FaultTrial(setting, engine, _DEADLINE_S)
    with closing(trial.store):
        for each in faults:
            trial.run(*each)
    for is_write in (True, False):
        trial = _FaultTrial(setting, engine, _SHORT_DEADLINE_S)
        with closing(trial.store):
            trial.run(LOST_COMPLETION, 3, is_write, forever=False)
    return PassedCheck(f"faults of {len(KINDS) + 1} kinds, in reads and writes", len(faults) + 2)


io_uring, threads, aiofiles = (
    partial(_engine, engine=name) for name in ("io_uring", "threads", "aiofiles")
)


class _FaultTrial:
    """A store in which one fault after the other is injected. right: the bytes that each chunk must
    have, by name.
    """

    def __init__(self, setting: Setting, engine: str, deadline_s: float) -> None:
        options: dict[str, Any] = {"depth": 4, "piece_bytes": _PIECE_BYTES}
        try:
            self.store = DiskStore(
                setting.directory, 2 << 20, engine=engine, timeout_s=deadline_s, **options
            )
        except ConfigError as error:  # the engine was asked for and is not available
            raise NotRun(str(error)) from error
        self.engine = engine
        self.numbers = np.random.default_rng(setting.seed)
        self.right: dict[str, Bytes] = {}
        for name in _SIZES:
            self.renew(name)

    def fresh(self, name: str) -> Bytes:
        return self.numbers.integers(0, 256, _SIZES[name], dtype=np.uint8)

    def require_right(self, name: str, got: Bytes, what: str) -> None:
        is_right = bool((got == self.right[name]).all())
        require(is_right, what, got="wrong bytes", expected="the right ones")

    def renew(self, name: str) -> None:
        self.right[name] = self.fresh(name)
        self.store.write(name, self.right[name]).wait(_HANG_S)

    def run(self, kind: Kind, nth: int, is_write: bool, forever: bool) -> None:
        operation = "writes" if is_write else "reads"
        lasting = " and all after it" if forever else ""
        what = f"{self.engine}: {kind.name} in {operation}, operation {nth}{lasting}"
        errors = self._operate(kind.at(nth, forever), is_write, what)
        self._judge(kind, is_write, forever, errors, what)
        self._look(kind, is_write, what)

    def _operate(self, fault: Fault, is_write: bool, what: str) -> list[OffloadError]:
        """Write or read all chunks at once while the fault is injected; return the errors. Requires
        the right bytes from each read that succeeds; each write that succeeds sets them.
        """
        data = {n: self.fresh(n) if is_write else np.empty_like(self.right[n]) for n in _SIZES}
        start: Callable[..., Any] = self.store.write if is_write else self.store.read
        self.store.engine.inject(fault)
        errors: list[OffloadError] = []
        tickets = {name: start(name, data[name]) for name in _SIZES}
        for name, ticket in tickets.items():
            try:
                ticket.wait(_HANG_S)
            except OffloadError as error:
                errors.append(error)
                continue
            if is_write:
                self.right[name] = data[name]
            else:
                self.require_right(name, data[name], f"{what}: {name}")
        met = self.store.engine.attempts()
        self.store.engine.inject(_HEALTHY)
        require(met >= fault.nth, f"{what}: operations", got=met, expected=f"{fault.nth} or more")
        return errors

    def _judge(
        self, kind: Kind, is_write: bool, forever: bool, errors: list[OffloadError], what: str
    ) -> None:
        """Require the right number of errors, each of the right type."""
        expected = kind.fails or StoreError
        for error in errors:
            is_typed = isinstance(error, expected) and isinstance(error, StoreError)
            shown = f"{type(error).__name__}: {error}"
            require(is_typed, f"{what}: error", got=shown, expected=expected.__name__)
        is_fatal = kind.fails is not None and not (is_write and kind.is_silent)
        if is_fatal:
            is_so = bool(errors) if forever or kind is LOST_COMPLETION else len(errors) == 1
            wanted = "some" if forever or kind is LOST_COMPLETION else "one"
            require(is_so, f"{what}: errors", got=len(errors), expected=wanted)
        elif not (kind.fault is FaultKind.LOST_WRITE and not is_write):
            # A read that moves no bytes may find the right ones in its buffer.
            require(not errors, f"{what}: errors", got=errors[:1], expected="none: it is mended")

    def _look(self, kind: Kind, is_write: bool, what: str) -> None:
        """Require the right bytes in all chunks, after a failed write the old ones, and that
        checksums find the chunks that a silent fault has damaged. These are written anew.
        """
        spoilt = 0
        for name in _SIZES:
            target = np.empty(_SIZES[name], dtype=np.uint8)
            try:
                self.store.read(name, target).wait(_HANG_S)
            except CorruptionError:
                spoilt += 1
                self.renew(name)
                continue
            self.require_right(name, target, f"{what}: {name} after it")
        is_silent = is_write and kind.is_silent
        is_so = spoilt >= 1 if is_silent else spoilt == 0
        wanted = "one or more" if is_silent else "none"
        require(is_so, f"{what}: spoilt chunks", got=spoilt, expected=wanted)


# --- training -------------------------------------------------------------------------------------


def training(setting: Setting) -> PassedCheck:
    """Check that a fault in a step raises a typed error, and that the state, which may be a mixture
    of two steps, cannot be used afterwards.
    """
    count = 0
    kinds = {FaultKind.ERROR: StoreError, FaultKind.FLIP: CorruptionError}
    for kind, expected in kinds.items():
        for nth in (1, 5) if setting.is_quick else (1, 3, 5, 8):
            _train_with_fault(setting, Fault(kind, nth, True, errno.EIO), expected)
            count += 1
    return PassedCheck("steps with a failing disk", count)


def _train_with_fault(setting: Setting, fault: Fault, expected: type[StoreError]) -> None:
    params = parameters(tensors(setting.seed), setting.device)
    optimizer = tight(setting, adamw(params))
    take_step(params, optimizer, tensors(setting.seed + 1))
    optimizer._offload_session.coordinator.store.engine.inject(fault)
    what = f"{fault.kind.name} in operation {fault.nth} of a step"
    with require_error(expected, what, "three steps without an error"):
        for turn in range(3):  # a bad write is found by the next read
            take_step(params, optimizer, tensors(setting.seed + 2 + turn))
    for use in (optimizer.step, optimizer.state_dict):
        with require_error(StateError, f"{use.__name__}() after {what}"):
            use()
    optimizer.close()
