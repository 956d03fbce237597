"""Ctrl-C at any moment: no lock stays held, nothing waits for ever, and no bit is another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import children
from support.interrupts import Moments
from support.loops import chosen, tally
from support.models import SEED

from offload import locks
from offload.checkpoint import background
from offload.errors import StateError, StoreTimeout, reason

pytestmark = pytest.mark.timeout(chosen(test=300, torture=7200))
DRAWN = chosen(test=20, torture=5000)  # of each kind
AT_LOCKS = chosen(test=60, torture=100_000)


# --- a training ---------------------------------------------------------------------------------


def interrupt(folder: Path, kind: str, seed: object, count: int) -> dict[str, Any]:
    """What the loop has done. A process of its own: one that hangs cannot be ended otherwise."""
    with children.Popen(
        children.program("support.interrupt_loop", folder, kind, str(seed), str(count)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=chosen(test=280, torture=7000))
        finally:
            process.kill()
    assert process.returncode == 0, said
    done: dict[str, Any] = json.loads(said.splitlines()[-1])
    tally("interrupts", done["interrupts"])
    assert done["threads left"] == [] and done["bytes left"] == 0
    return done


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
def test_interrupts_at_moments_that_are_drawn(kind: str, tmp_path: Path) -> None:
    """In steps, saves, background saves beside steps, loads and closes."""
    done = interrupt(tmp_path / "drawn", kind, SEED, DRAWN)
    assert done["interrupts"] >= DRAWN


def test_interrupts_where_locks_are_entered(tmp_path: Path) -> None:
    """Conditions that Python enters had been left held there, and the next load waited for ever."""
    assert interrupt(tmp_path / "locks", "wrap", "locks", AT_LOCKS)["interrupts"] > 0


# --- locks.py -----------------------------------------------------------------------------------


class Guarded:
    """Two numbers that are the same whenever the lock is free."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.gate = locks.Gate(self.lock)
        self.first = self.second = 0

    @locks.uninterrupted
    def change(self) -> None:
        with self.lock:
            self.first += 1
            self.gate.notify_all()
            self.second += 1

    def attempt(self) -> None:
        with locks.attempt(self.lock) as is_ours:
            assert is_ours
            self.first += 1
            self.gate.notify_all()
            self.second += 1

    def wait(self) -> None:
        with self.lock:
            self.gate.wait(0.001)


@pytest.mark.parametrize("act", ["change", "attempt", "wait"])
def test_no_moment_leaves_a_lock_held_or_a_section_half_done(act: str) -> None:
    number = 0
    while True:
        number += 1
        guarded = Guarded()
        moments = Moments(number)
        try:
            with moments:
                getattr(guarded, act)()
        except KeyboardInterrupt:
            pass
        else:
            assert moments.came_at is None, f"Ctrl-C was lost: {moments}"
        assert not guarded.lock.locked(), moments
        assert guarded.first == guarded.second, moments
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, moments
        assert locks._DEFERRAL.depth == 0 and not locks._DEFERRAL.is_open, moments
        if moments.came_at is None:
            break
    assert number > 10


def test_a_wait_in_a_section_is_ended_but_not_one_in_a_steadfast_section() -> None:
    def press() -> None:
        time.sleep(0.05)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    held = threading.Lock()
    held.acquire()
    for section, least_s, most_s in ((locks.uninterrupted, 0.0, 55.0), (locks.steadfast, 0.3, 55)):
        thread = threading.Thread(target=press)
        thread.start()
        begin_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt), section:
            locks.acquire(held, 0.3 if section is locks.steadfast else 60.0)
        assert least_s <= time.monotonic() - begin_s < most_s
        thread.join()


def test_a_wait_names_what_did_not_come_and_goes_on_as_long_as_something_does() -> None:
    lock = threading.Lock()
    gate, seen = locks.Gate(lock), iter(range(3))
    with lock, pytest.raises(StoreTimeout, match=r"^save of x: nothing has come of it for 0\.01 s"):
        gate.wait_until(lambda: False, "save of x", 0.01, lambda: next(seen, None))
    assert next(seen, None) is None, "it has waited on as long as there was progress"
    assert not lock.locked()


def test_a_flag_wakes_who_waits() -> None:
    flag = locks.Flag()
    thread = threading.Thread(target=flag.wait, args=("it", 60.0))
    thread.start()
    flag.set()
    thread.join(30)
    assert not thread.is_alive()


def test_handlers_of_others_are_called_once_and_are_there_again() -> None:
    heard: list[int] = []

    def handler(number: int, frame: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with locks.uninterrupted, locks.steadfast:
            signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with locks.uninterrupted:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_child_is_in_no_section() -> None:
    with locks.uninterrupted:
        child = os.fork()
        if not child:
            is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            os._exit(0 if is_plain and locks._DEFERRAL.depth == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- what is told -------------------------------------------------------------------------------


class Ended:
    """A background save that ends with an error that says nothing."""

    def __init__(self, path: Path, error: BaseException) -> None:
        self.path, self.error = path, error
        self.owners: list[Any] = [torch.nn.Linear(1, 1)]

    def finish(self) -> Path:
        raise self.error

    def give_up(self, error: BaseException) -> None: ...

    def tell_failure(self, error: BaseException) -> None: ...

    def progress(self) -> object: ...


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), r"KeyboardInterrupt \(Ctrl-C\)"),
        (MemoryError(), "MemoryError, without a word"),
        (OSError("full"), "OSError: full"),
    ],
)
def test_a_background_save_that_ended_says_by_what(
    error: BaseException, told: str, tmp_path: Path
) -> None:
    task = Ended(tmp_path / "c", error)
    background.start(task)
    with pytest.raises(StateError, match=rf"/c failed.*: {told}; nothing of it was kept.*again"):
        background.settle(task.owners)
    assert reason(error)
