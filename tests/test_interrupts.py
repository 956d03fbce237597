"""Ctrl-C at any moment: no lock stays held, nothing waits for ever, and no bit is another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from support import children
from support.interrupts import Moments
from support.loops import SEED, chosen, tally
from torch import Tensor, nn

from offload.checkpoint import saves
from offload.core import locks
from offload.core.errors import StateError, StoreTimeout, reason
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.device.device import DeviceTransfer
from offload.distributed.ranks import Ranks
from offload.params import gradients as device_tier
from offload.params.gathered import Gathered, GatheredBlockMemory, HostGathered
from offload.params.gradients import DeviceGradients, gradient_memory
from offload.params.mean_gradients import MeanGradients, ShardContext
from offload.params.placeholder import set_own_grad
from offload.planning.sharding import Sharding
from offload.planning.unit import Member, Unit

pytestmark = pytest.mark.timeout(chosen(test=300, torture=7200))
DRAWN = chosen(test=20, torture=500)  # of each kind
BY_CLOCK = chosen(test=20, torture=5000)  # of each kind
AT_LOCKS = chosen(test=60, torture=100_000)


# --- a training ---------------------------------------------------------------------------------


def interrupt(folder: Path, kind: str, seed: object, count: int) -> dict[str, Any]:
    """Run the loop in a process of its own, since one that hangs cannot be ended otherwise, and
    return what it has done.
    """
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


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
def test_interrupts_at_any_time(kind: str, tmp_path: Path) -> None:
    """The same by the clock, which no tracer slows down."""
    assert interrupt(tmp_path / "clock", kind, "clock", BY_CLOCK)["interrupts"] >= BY_CLOCK


def test_interrupts_where_locks_are_entered(tmp_path: Path) -> None:
    """Conditions that Python enters had been left held there, and the next load waited for ever."""
    assert interrupt(tmp_path / "locks", "wrap", "locks", AT_LOCKS)["interrupts"] > 0


# --- locks.py -----------------------------------------------------------------------------------


class Guarded:
    """A pair of numbers that are equal whenever the lock is free."""

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
        assert locks._DEFERRAL.depth == locks._DEFERRAL.open_at == 0, moments
        if moments.came_at is None:
            break
    assert number > 10


def test_no_moment_leaves_a_guard_of_torchs_in_force() -> None:
    """Python runs a signal handler at the end of a call, within the `with` that the call ends: a
    tracer that raises one instruction later is not what Ctrl-C does.
    """

    def largest(*numbers: int) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return max(*numbers)

    for number in range(1, 100):
        moments = Moments(number)
        with suppress(KeyboardInterrupt), moments:
            largest(1, 2)
        assert torch._C._is_torch_function_enabled(), moments
        if moments.came_at is None:
            break
    assert 2 < number < 99


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
    with lock, pytest.raises(StoreTimeout, match=r"^save of x: no progress for 0\.01 s"):
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


def test_a_child_forked_in_a_steadfast_section_can_be_interrupted_where_it_waits() -> None:
    with locks.steadfast:
        child = os.fork()
    if not child:
        try:
            with locks.uninterrupted:
                signal.raise_signal(signal.SIGINT)
                locks.nap(0.001)
                os._exit(1)
        except KeyboardInterrupt:
            os._exit(0 if locks._DEFERRAL.steadfast == 0 else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- handlers that use the engine themselves ------------------------------------------------------


class OtherMoments(Moments):
    """The moments at which a handler of another signal may run: SIGUSR1 comes instead."""

    def _pass(self, place: Any) -> None:
        self.count += 1
        if self.count == self._at:
            self.came_at = place
            signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def handlers() -> Iterator[Callable[[int, Callable[[], object]], None]]:
    """Yield a function that sets a handler, until the test is over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield lambda number, act: signal.signal(number, lambda *_: act()) and None
    for number, handler in before.items():
        signal.signal(number, handler)


def at_every_moment(run: Callable[[OtherMoments], None], act: Callable[[], object]) -> None:
    """Do `act`, with the other signal at one of its moments after the other; then `run`."""
    number = 0
    while True:
        number += 1
        moments = OtherMoments(number)
        with moments:
            act()
        run(moments)
        if moments.came_at is None:
            break
    assert number > 10


SECTIONS = ["change", "attempt", "wait"]


@pytest.mark.parametrize("act", SECTIONS)
def test_ctrl_c_works_after_a_section_at_any_moment_of_another(act: str, handlers: Any) -> None:
    """A section had taken what the other one had put in place for the user's handler: every later
    Ctrl-C was lost, and one in a wait was a RecursionError.
    """

    def use() -> None:
        with locks.uninterrupted:
            locks.nap(0.0)

    def press(moments: Moments) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), locks.uninterrupted:
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), locks.uninterrupted:
            signal.raise_signal(signal.SIGINT)
            locks.nap(0.001)
            pytest.fail(f"not in the wait: {moments}")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, moments
        assert locks._DEFERRAL.depth == 0, moments

    handlers(signal.SIGUSR1, use)
    at_every_moment(press, getattr(Guarded(), act))


@pytest.mark.parametrize("act", SECTIONS)
def test_ctrl_c_in_a_section_at_any_moment_of_another_is_heard_once(
    act: str, handlers: Any
) -> None:
    """After the section that it came in, also where that is a handler's in the midst of a wait."""
    heard: list[bool] = []
    inner = threading.Lock()

    def use() -> None:
        with locks.uninterrupted, inner:
            signal.raise_signal(signal.SIGINT)

    def check(moments: Moments) -> None:
        assert heard == ([] if moments.came_at is None else [False]), moments
        assert locks._DEFERRAL.depth == 0 and locks._DEFERRAL.noted is None, moments
        heard.clear()

    handlers(signal.SIGINT, lambda: heard.append(inner.locked()))
    handlers(signal.SIGUSR1, use)
    at_every_moment(check, getattr(Guarded(), act))


def test_a_handler_that_is_put_back_after_the_section_it_was_found_in(handlers: Any) -> None:
    """What was found there stands for the user's handler, for ever."""
    heard: list[str] = []
    handlers(signal.SIGINT, lambda: heard.append("first"))
    with locks.uninterrupted:
        found = signal.getsignal(signal.SIGINT)
        handlers(signal.SIGINT, lambda: heard.append("second"))
    with locks.uninterrupted:
        signal.raise_signal(signal.SIGINT)
        assert heard == []
    signal.signal(signal.SIGINT, found)
    signal.raise_signal(signal.SIGINT)
    assert heard == ["second", "first"]
    with locks.uninterrupted:
        signal.raise_signal(signal.SIGINT)
        locks.nap(0.0)
        assert heard == ["second", "first", "first"]
    assert len(heard) == 3 and signal.getsignal(signal.SIGINT) is not found


def test_a_handler_that_waits_leaves_the_wait_open_that_it_has_interrupted(handlers: Any) -> None:
    heard: list[int] = []

    def hear() -> None:
        heard.append(len(heard))
        locks.nap(0.0)

    def wait() -> None:
        signal.raise_signal(signal.SIGINT)
        assert heard == [0]
        signal.raise_signal(signal.SIGINT)
        assert heard == [0, 1]

    handlers(signal.SIGINT, hear)
    with locks.uninterrupted:
        locks._waiting(wait)
        assert heard == [0, 1]


def test_ctrl_c_in_a_handlers_section_ends_the_wait_at_once(handlers: Any) -> None:
    def use() -> None:
        with locks.uninterrupted:
            signal.raise_signal(signal.SIGINT)
            done.append("section")

    def wait() -> None:
        signal.raise_signal(signal.SIGUSR1)
        done.append("wait")

    done: list[str] = []
    handlers(signal.SIGUSR1, use)
    with pytest.raises(KeyboardInterrupt), locks.uninterrupted:
        locks._waiting(wait)
    assert done == ["section"]


# --- gradients on their way -----------------------------------------------------------------------


class Copies:
    """A stand-in for a device's transfer, and for the network between ranks: copies end when `go`
    is called; a wait for one presses Ctrl-C, while `presses`.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.presses = False
        self._pending: list[tuple[Ticket[Tensor], Tensor, Tensor]] = []

    def read(self, source: Tensor, host: Tensor, what: str) -> Ticket[Tensor]:
        ticket: Ticket[Tensor] = Ticket(what)
        ticket.urge = self._press
        self._pending.append((ticket, source.clone(), host))
        return ticket

    def _press(self) -> None:
        if self.presses:
            signal.raise_signal(signal.SIGINT)
        else:
            self.go()

    def reduce(self, whole: Gathered, target: Tensor, what: str) -> Ticket[Tensor]:
        return self.read(whole.use().view(target.dtype)[: target.numel()], target, what)

    def make(self, nbytes: int, what: str, parts: Any) -> Gathered:
        return HostGathered(torch.zeros(nbytes, dtype=torch.uint8))

    def exchange(self, value: Any, what: str) -> list[Any]:
        return [value]

    def go(self) -> None:
        for ticket, source, host in self._pending:
            host.copy_(source)
            ticket.finish(host)
        self._pending = []

    def fail(self) -> None:
        for ticket, *_ in self._pending:
            ticket.fail(StateError("the device has gone"))
        self._pending = []


def device_gradients(copies: Copies, numel: int = 64) -> tuple[nn.Parameter, DeviceGradients]:
    pool, param = Pool(1 << 20), nn.Parameter(torch.zeros(numel))
    places, transfer = gradient_memory({0: param}, pool), cast(DeviceTransfer, copies)
    made = DeviceGradients({0: param}, places, pool, transfer, Metrics(), {param: "w"})
    return param, made


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_ctrl_c_while_a_gradient_is_awaited_loses_no_part_of_it(passes: int) -> None:
    """A copy that was to be added had been removed from the list before it was waited for."""
    copies = Copies()
    param, gradients = device_gradients(copies)
    for number in range(passes):
        set_own_grad(param, torch.full((64,), 10.0**number))
        gradients.arrived(0)
    copies.presses = True
    for ask in (lambda: gradients.of(param), gradients.end_backward):
        with pytest.raises(KeyboardInterrupt):
            ask()
    copies.go()
    assert torch.equal(
        cast(Tensor, gradients.of(param)), torch.full((64,), (1.0, 11, 111)[passes - 1])
    )
    assert len(gradients._slots) == device_tier.STAGING_PLACES


def test_ctrl_c_while_a_gradient_is_taken_in_parts_adds_no_part_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_tier, "STAGING_MOST_BYTES", 64)
    copies = Copies()
    param, gradients = device_gradients(copies)
    set_own_grad(param, torch.ones(64))
    gradients.arrived(0)
    set_own_grad(param, torch.ones(64))
    heard = iter([signal.SIGINT])
    copies.go()

    def press() -> None:
        for number in heard:
            signal.raise_signal(number)
        copies.go()

    monkeypatch.setattr(copies, "_press", press)  # of four parts three have room
    with pytest.raises(KeyboardInterrupt):
        gradients.of(param)
    assert torch.equal(cast(Tensor, gradients.of(param)), torch.full((64,), 2.0))


def test_a_gradient_whose_copy_has_failed_is_told_once_and_leaves_its_place() -> None:
    copies = Copies()
    param, gradients = device_gradients(copies)
    for _ in range(2):
        set_own_grad(param, torch.ones(64))
        gradients.arrived(0)
    copies.fail()
    for _ in range(2):
        with pytest.raises(StateError, match="the device has gone"):
            gradients.of(param)
    gradients.end_backward()
    assert len(gradients._slots) == device_tier.STAGING_PLACES


def test_a_download_that_does_not_begin_leaves_its_staging_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffer was lost, and once the others were in use the next addend had none."""
    copies = Copies()
    param, gradients = device_gradients(copies)
    set_own_grad(param, torch.ones(64))
    gradients.arrived(0)
    with monkeypatch.context() as patch:
        patch.setattr(copies, "read", Mock(side_effect=RuntimeError("out of memory")))
        set_own_grad(param, torch.ones(64))
        with pytest.raises(RuntimeError, match="out of memory"):
            gradients.arrived(0)
    assert len(gradients._slots) == device_tier.STAGING_PLACES
    for _ in range(device_tier.STAGING_PLACES + 1):
        set_own_grad(param, torch.ones(64))
        gradients.arrived(0)
    expected = torch.full((64,), 2.0 + device_tier.STAGING_PLACES)
    assert torch.equal(cast(Tensor, gradients.of(param)), expected)


def test_ctrl_c_while_a_mean_is_awaited_loses_no_part_of_it() -> None:
    copies, param = Copies(), nn.Parameter(torch.zeros(64))
    unit = Unit(0, "layer", (), (Member("w", param, 0, param.shape, param.dtype),), (0,))
    shard_context = ShardContext(
        cast(Ranks, copies),
        Sharding(0, 1, gradient_bytes=1 << 20),
        cast(GatheredBlockMemory, copies),
    )
    means = MeanGradients([unit], {0: param}, shard_context, Pool(1 << 20), Metrics(), set)
    for number, presses in enumerate((False, True)):
        copies.presses = presses
        means.begin()
        set_own_grad(param, torch.full((64,), 10.0**number))
        means.arrived(0)
        with pytest.raises(KeyboardInterrupt) if presses else nullcontext():
            means.end_backward()
    copies.go()
    means.end_backward()
    assert torch.equal(cast(Tensor, means.sums[0].place), torch.full((64,), 11.0))


# --- what is told -------------------------------------------------------------------------------


class Ended:
    """A background save that ends with an error that says nothing."""

    def __init__(self, path: Path, error: BaseException) -> None:
        self.path, self.error = path, error
        self.owners: list[Any] = [torch.nn.Linear(1, 1)]
        self.ticket: Ticket[Path] = Ticket(f"save of {path}")
        self.is_over = locks.Flag()

    def finish(self) -> Path:
        raise self.error

    def give_up(self, error: BaseException) -> None: ...

    def tell_failure(self, error: BaseException) -> None: ...

    def progress(self) -> object: ...


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), r"KeyboardInterrupt \(Ctrl-C\)"),
        (MemoryError(), "MemoryError, without a message"),
        (OSError("full"), "OSError: full"),
    ],
)
def test_a_background_save_that_ended_says_by_what(
    error: BaseException, told: str, tmp_path: Path
) -> None:
    task = Ended(tmp_path / "c", error)
    saves.start(task)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=rf"/c failed.*: {told}; nothing of it was kept.*again"):
        saves.await_saves(task.owners)
    assert reason(error)
