"""Every engine, one contract: exact bytes, priorities, deadlines, an orderly end."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import children
from support.stores import (
    BLOCK,
    ENGINES,
    HANG_S,
    HEALTHY,
    MIB,
    PIECE,
    Counter,
    flip_bit,
    is_direct,
    memory_at,
    nbytes_of,
    nothing_left,
    open_store,
    peek,
    places,
    plug,
    poke,
    random_bytes,
    read,
    until,
    write,
)

from offload.core.budget import Budget
from offload.core.errors import OffloadError, StateError, StoreError, StoreTimeout
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind, Group, Priority

SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB + 7)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(engine: str, tmp_path: Path) -> Iterator[DiskStore]:
    with open_store(tmp_path, engine, capacity_bytes=8 * MIB) as store:
        yield store


@pytest.fixture
def narrow(engine: str, tmp_path: Path) -> Iterator[DiskStore]:
    """Open a store with one operation at a time."""
    with open_store(tmp_path, engine, depth=1, piece_bytes=PIECE) as store:
        yield store


@pytest.fixture
def hasty(engine: str, tmp_path: Path) -> Iterator[DiskStore]:
    """Open a store that gives up after 0.3 s, with two places in flight."""
    with open_store(tmp_path, engine, depth=2, piece_bytes=PIECE, timeout_s=0.3) as store:
        yield store


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, 520])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_come_back_wherever_they_lie_in_memory(
    store: DiskStore, nbytes: int, shift: int
) -> None:
    """Nothing around the target changes, and the file has zeros behind the end."""
    assert is_direct(store), "the tests need a directory with O_DIRECT"
    dirt = memory_at(1, MIB)
    dirt[:] = 0xFF
    write(store, "dirt", dirt)  # through a buffer of the engine's own, which is used again
    store.free("dirt")
    poke(store, 0, 0, b"\xff" * (nbytes + BLOCK))
    source = memory_at(shift, nbytes)
    source[:] = random_bytes(nbytes, nbytes)
    write(store, "w", source)
    around = memory_at(0, nbytes + 2 * BLOCK)
    around[:] = 0xA5
    target = around[BLOCK - shift :][:nbytes]
    store.read("w", target).wait(HANG_S)
    assert (target == source).all()
    assert (around[: BLOCK - shift] == 0xA5).all()
    assert (around[BLOCK - shift + nbytes :] == 0xA5).all()
    for file, begin, length in places(store, "w"):
        padding = -length % BLOCK
        assert peek(store, file, begin, length + padding) == source.tobytes() + bytes(padding)


def test_a_chunk_in_several_extents(engine: str, tmp_path: Path) -> None:
    with open_store(tmp_path, engine, capacity_bytes=16 * BLOCK, piece_bytes=PIECE) as store:
        for i in range(16):
            write(store, f"hole {i}", random_bytes(BLOCK, i))
        for i in range(0, 16, 2):
            store.free(f"hole {i}")
        source = memory_at(3, 7 * BLOCK + 5)
        source[:] = random_bytes(len(source), 99)
        write(store, "w", source)
        assert len(places(store, "w")) == 8
        assert (read(store, "w") == source).all()
        assert (read(store, "hole 3") == random_bytes(BLOCK, 3)).all()


# --- whose turn it is -----------------------------------------------------------------------------


def submit_all(store: DiskStore, order: list[str]) -> dict[str, Any]:
    """Submit write-backs, then prefetches, behind a plug; `order` gets their names as they end."""
    data = random_bytes(BLOCK, 1)
    write(store, "r", data)

    def noted(name: str, ticket: Any) -> Any:
        return ticket.then(lambda _: order.append(name))

    tickets = {"plug": noted("plug", plug(store, data))}
    for i in range(3):
        tickets[f"w{i}"] = noted(f"w{i}", store.write(f"w{i}", data))
    for i in range(3):
        target = np.empty_like(data)
        tickets[f"p{i}"] = noted(f"p{i}", store.read("r", target, Priority.PREFETCH))
    return tickets


def test_what_is_waited_for_goes_first(narrow: DiskStore) -> None:
    order: list[str] = []
    submit_all(narrow, order)
    target = np.empty(BLOCK, dtype=np.uint8)
    late = narrow.read("r", target, Priority.WAITED_FOR).then(lambda _: order.append("late"))
    assert narrow.engine.attempts() == 1, "the plug has gone too soon"
    late.wait(HANG_S)
    until(lambda: len(order) == 8)
    assert order == ["plug", "late", "p0", "p1", "p2", "w0", "w1", "w2"]


def test_waiting_for_a_prefetch_promotes_it(narrow: DiskStore) -> None:
    order: list[str] = []
    tickets = submit_all(narrow, order)
    assert narrow.engine.attempts() == 1, "the plug has gone too soon"
    tickets["p2"].wait(HANG_S)
    until(lambda: len(order) == 7)
    assert order == ["plug", "p2", "p0", "p1", "w0", "w1", "w2"]


def test_a_large_read_is_overtaken_between_its_pieces(narrow: DiskStore) -> None:
    order: list[str] = []
    large, small = random_bytes(20 * PIECE, 1), random_bytes(100, 2)
    write(narrow, "large", large)
    write(narrow, "small", small)
    plugged = plug(narrow, small)
    targets = np.empty_like(large), np.empty_like(small)
    first = narrow.read("large", targets[0], Priority.PREFETCH)
    second = narrow.read("small", targets[1])
    both = [t.then(lambda _, n=n: order.append(n)) for n, t in (("l", first), ("s", second))]
    for ticket in (plugged, *both):
        ticket.wait(HANG_S)
    assert order == ["s", "l"]
    assert (targets[0] == large).all()


# --- deadlines ------------------------------------------------------------------------------------


def test_no_answer_is_an_error_in_time(hasty: DiskStore) -> None:
    """With a table of what is in flight; the memory is kept, for it may still be written to."""
    for name in ("layer.1", "layer.2"):
        write(hasty, name, random_bytes(700, 3))
    targets = [np.empty(700, dtype=np.uint8) for _ in range(2)]
    kept = [weakref.ref(target) for target in targets]
    hasty.engine.inject(Fault(FaultKind.LOST_COMPLETION, nth=1, forever=True))
    begin_s = time.monotonic()
    tickets = [hasty.read(f"layer.{i + 1}", targets[i]) for i in range(2)]
    with pytest.raises(StoreTimeout, match=r"no answer from .* within 0\.3 s.*dmesg") as caught:
        tickets[0].wait(HANG_S)
    assert 0.25 < time.monotonic() - begin_s < 20
    message = str(caught.value)
    table = message[message.index("in flight:") :]
    assert "read of layer.1, 700 B at" in table
    assert "read of layer.2, 700 B at" in table
    error = caught.value
    assert (error.errno, error.operation, error.tensor) == (errno.ETIMEDOUT, "read", "layer.1")
    with pytest.raises(StoreTimeout):
        tickets[1].wait(HANG_S)
    targets.clear()
    hasty.close()
    del caught, error, tickets
    gc.collect()
    assert all(ref() is not None for ref in kept)
    assert hasty.engine.abandoned_bytes == 1400


def test_an_answer_that_comes_late_ends_the_matter(hasty: DiskStore) -> None:
    write(hasty, "w", random_bytes(700, 3))
    target = np.empty(700, dtype=np.uint8)
    kept = weakref.ref(target)
    hasty.engine.inject(Fault(FaultKind.DELAY, nth=1, code=500, forever=True))
    tickets = [hasty.read("w", target), hasty.read("w", bytearray(700))]  # in all places there are
    for ticket in tickets:
        with pytest.raises(StoreTimeout):
            ticket.wait(HANG_S)
    del target, ticket, tickets
    hasty.engine.inject(HEALTHY)
    until(lambda: hasty.engine.abandoned_bytes == 0, "the late answers")
    until(lambda: kept() is None, "the end of the memory")
    assert (read(hasty, "w") == random_bytes(700, 3)).all()


def test_memory_is_let_go_with_the_operation(store: DiskStore) -> None:
    """No worker holds it until its next operation: a lease would not come back."""
    source = random_bytes(700, 3)
    kept = weakref.ref(source)
    write(store, "w", source)
    del source
    until(lambda: kept() is None, "the end of the memory")


@pytest.mark.parametrize("kind", ["write", "read"])
def test_memory_is_let_go_before_its_ticket_ends(store: DiskStore, kind: str) -> None:
    """The waiting thread may need the room for the next block at once, and gives up where there is
    none: the engine's thread must not hold the piece for as long as it takes to come back from its
    call.
    """
    write(store, "w", random_bytes(700, 3))
    memory = random_bytes(700, 4)
    kept = weakref.ref(memory)
    store.engine.inject(Fault(FaultKind.DELAY, code=100))
    ticket = getattr(store, kind)("w", memory)
    del memory
    is_free = ticket.then(lambda _: kept() is None)  # in the thread that ends it
    assert is_free.wait(HANG_S), "the memory is still held when its ticket has ended"


@pytest.mark.parametrize("extents", [1, 2])
def test_a_time_out_is_told_rather_than_another_error(hasty: DiskStore, extents: int) -> None:
    """One piece is lost and the other one corrupt: that memory is still in use matters more."""
    if extents == 2:
        rest = hasty.stats().capacity_bytes - 3 * PIECE
        for name, nbytes in (("a", PIECE), ("wall", PIECE), ("b", PIECE), ("rest", rest)):
            write(hasty, name, random_bytes(nbytes, 1))
        hasty.free("a")
        hasty.free("b")
    write(hasty, "w", random_bytes(2 * PIECE, 3))
    assert len(places(hasty, "w")) == extents
    for bit in (5, 8 * PIECE + 5):
        flip_bit(hasty, "w", bit)
    target = np.empty(2 * PIECE, dtype=np.uint8)
    hasty.engine.inject(Fault(FaultKind.LOST_COMPLETION, nth=1))
    with pytest.raises(StoreTimeout):
        hasty.read("w", target).wait(HANG_S)
    assert hasty.engine.abandoned_bytes == 2 * PIECE // extents
    assert hasty.stats().quarantined_bytes == 2 * PIECE


def test_what_is_stuck_outlives_its_store(engine: str, tmp_path: Path) -> None:
    store = open_store(tmp_path, engine, timeout_s=0.3)
    source = random_bytes(700, 3)
    kept = weakref.ref(source)
    store.engine.inject(Fault(FaultKind.LOST_COMPLETION))
    with pytest.raises(StoreTimeout):
        store.write("w", source).wait(HANG_S)
    store.close()
    del store, source
    gc.collect()
    assert kept() is not None


def test_all_places_lost_is_no_hang(hasty: DiskStore) -> None:
    """Requests behind it fail, and keep neither memory nor room."""
    data = random_bytes(700, 3)
    write(hasty, "w", data)
    used = hasty.stats().used_bytes
    hasty.engine.inject(Fault(FaultKind.LOST_COMPLETION, nth=1, forever=True))
    lost = [hasty.write(f"lost {i}", data) for i in range(2)]
    for ticket in lost:
        with pytest.raises(StoreTimeout, match="write of lost"):
            ticket.wait(HANG_S)
    hasty.engine.inject(HEALTHY)
    stats = hasty.stats()
    assert (stats.used_bytes, stats.quarantined_bytes) == (used + 2 * BLOCK, 2 * BLOCK)
    target = np.empty_like(data)
    tickets = [hasty.read("w", target), hasty.write("v", data)]
    for ticket in tickets:
        if hasty.engine.name == "aiofiles":  # its workers go on
            ticket.wait(HANG_S)
        else:
            with pytest.raises(StoreTimeout, match=r"not started(.|\n)*of lost 0") as error:
                ticket.wait(HANG_S)
            assert error.value.errno == errno.ETIME
    assert hasty.engine.abandoned_bytes == 1400
    assert hasty.stats().quarantined_bytes == 2 * BLOCK


# --- other threads, and the end -------------------------------------------------------------------


def test_other_threads_run_meanwhile(narrow: DiskStore) -> None:
    with Counter() as counter:
        ticket = plug(narrow, random_bytes(BLOCK, 1))
        before = counter.count
        ticket.wait(HANG_S)
        assert counter.count > before + 1000
        plug(narrow, random_bytes(BLOCK, 1))
        before = counter.count
        narrow.close()
        assert counter.count > before + 1000


def test_many_threads(store: DiskStore) -> None:
    shared = random_bytes(3 * MIB, 77)
    write(store, "shared", shared)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for i in range(15):
            data = random_bytes(int(rng.integers(1, 200_000)), 100 * number + i)
            write(store, f"own {number}", data)
            assert (read(store, f"own {number}") == data).all()
            if i % 5 == 0:
                assert (read(store, "shared") == shared).all()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert store.stats().used_bytes == sum(
        -(-nbytes_of(store, name) // BLOCK) * BLOCK for name in store.names()
    )


def test_the_end_finishes_what_is_in_flight_and_cancels_the_rest(narrow: DiskStore) -> None:
    data = random_bytes(BLOCK, 1)
    begin_s = time.monotonic()
    flying = plug(narrow, data)
    waiting = [narrow.write(f"w{i}", data) for i in range(3)]
    narrow.close()
    narrow.close()
    assert time.monotonic() - begin_s < 15, "the answer was lost and only its deadline ended it"
    flying.wait(HANG_S)
    for ticket in waiting:
        with pytest.raises(StateError, match=r"write of w\d .*the store was closed before"):
            ticket.wait(HANG_S)
    with pytest.raises(StateError, match="store: closed"):
        narrow.write("w", data)


def test_closing_while_others_submit(engine: str, tmp_path: Path) -> None:
    """Every thread that was let in gets an answer."""
    for _ in range(5):
        store = open_store(tmp_path, engine, timeout_s=5.0)
        write(store, "w", random_bytes(100, 1))
        gate = threading.Barrier(5)

        def work(store: DiskStore = store, gate: threading.Barrier = gate) -> int:
            gate.wait()
            for done in range(10**6):
                try:
                    read(store, "w")
                except StateError:
                    return done
            return -1

        with ThreadPoolExecutor(4) as threads:
            ends = [threads.submit(work) for _ in range(4)]
            gate.wait()
            until(lambda store=store: store.stats().read_bytes > 1000)  # type: ignore[misc]
            store.close()
            assert all(end.result(HANG_S) >= 0 for end in ends)


def test_closing_between_two_steps_of_submitting(engine: str, tmp_path: Path) -> None:
    """Refused, if it comes before the engine knows of the request; else cancelled. Never a hang."""
    store = open_store(tmp_path, engine, timeout_s=5.0)
    write(store, "w", random_bytes(100, 1))
    check = store.engine.check_usable

    def check_then_close() -> None:
        check()
        store.close()

    store.engine.check_usable = check_then_close  # type: ignore[method-assign]
    with pytest.raises(StateError, match="store: closed"):
        store.engine.submit(Group(Ticket("nothing"), Priority.PREFETCH), [])
    store = open_store(tmp_path, engine, timeout_s=5.0)
    start, closing = store.engine._start, threading.Thread(target=store.close)

    def close_then_start(*args: Any) -> None:
        closing.start()
        closing.join(0.2)
        start(*args)

    store.engine._start = close_then_start  # type: ignore[method-assign]
    with pytest.raises(StateError, match="the store was closed before it was done"):
        store.write("w", random_bytes(100, 1)).wait(4.0)
    closing.join()


def test_a_closed_store_keeps_no_file(engine: str, tmp_path: Path) -> None:
    """Neither does a ring that still knows it: its space would be gone as long as the object is.

    A lock belongs to an open file; another open file gets it when the first has gone.
    """
    with nothing_left():
        store = open_store(tmp_path, engine)
        fd = store._files[0].fd
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)

        def is_free() -> bool:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        assert not is_free()
        store.close()
        until(is_free, "the end of the file")
        os.close(other)
        del store


def test_an_error_that_nobody_waits_for_is_reported(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its ticket is freed, not at some garbage collection later."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    gc.disable()
    try:
        store.engine.inject(Fault(FaultKind.ERROR, code=errno.EIO))
        store.write("layer.1", random_bytes(100, 1))
        until(lambda: bool(seen), "the report")
    finally:
        gc.enable()
    assert "write of layer.1: never waited for" in seen[0].err_msg
    assert isinstance(seen[0].exc_value, StoreError)


def test_a_store_that_is_forgotten_closes_itself(engine: str, tmp_path: Path) -> None:
    with nothing_left():
        store = open_store(tmp_path, engine)
        write(store, "w", random_bytes(100, 1))
        del store


def test_errors_are_raised_in_the_callers_thread(store: DiskStore) -> None:
    store.engine.inject(Fault(FaultKind.ERROR, code=errno.EIO))
    with pytest.raises(OffloadError) as caught:
        write(store, "w", random_bytes(100, 1))
    assert caught.traceback[0].name == "test_errors_are_raised_in_the_callers_thread"


# --- what must not end the engine -----------------------------------------------------------------


def test_a_follow_up_that_breaks_is_the_ticket_s_alone(narrow: DiskStore) -> None:
    data = random_bytes(BLOCK, 1)
    write(narrow, "w", data)
    used = narrow.read("w", np.empty_like(data))
    used.wait(HANG_S)
    plugged = plug(narrow, data)
    chain = narrow.read("w", np.empty_like(data)).then(lambda _: used)
    with pytest.raises(StateError, match="waited for already"):
        chain.wait(HANG_S)
    plugged.wait(HANG_S)
    assert (read(narrow, "w") == data).all()


def test_a_wait_in_a_follow_up_is_refused(narrow: DiskStore) -> None:
    data = random_bytes(BLOCK, 1)
    write(narrow, "w", data)
    plugged, later = plug(narrow, data), []

    def act(_: None) -> None:
        later.append(narrow.read("w", np.empty_like(data)))
        later[0].wait()

    with pytest.raises(StateError, match="read of w: waited for in a follow-up"):
        plugged.then(act).wait(HANG_S)
    later[0].wait(HANG_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_has_died_says_so(engine: str, tmp_path: Path) -> None:
    """All that is in flight fails, the rest is refused; nothing hangs."""
    with open_store(tmp_path, engine, depth=1, piece_bytes=PIECE, timeout_s=3.0) as store:
        data = random_bytes(BLOCK, 1)
        write(store, "w", data)
        end, calls = store.engine._end, []

        def broken(number: int, code: int, at: int = 0) -> None:
            calls.append(number)
            if len(calls) == 1:
                raise MemoryError("no more")
            end(number, code, at)

        plugged = plug(store, data)
        tickets = [store.read("w", np.empty_like(data)) for _ in range(3)]
        store.engine._end = broken  # type: ignore[method-assign]
        failed = 0
        for ticket in (plugged, *tickets):
            try:
                ticket.wait(HANG_S)
            except StoreTimeout as error:
                assert "the I/O engine has failed (MemoryError('no more'))" in str(error)
                failed += 1
        assert failed >= 1
        until(lambda: store.engine._broken is not None)
        with pytest.raises(StateError, match="its I/O engine has failed; start again"):
            store.read("w", np.empty_like(data))


STOPPED = """
import sys, numpy as np
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind

directory, engine = sys.argv[1:]
with DiskStore(directory, 1 << 20, engine=engine, depth=1, timeout_s=1.0) as store:
    data = np.ones(4096, dtype=np.uint8)
    store.write("w", data).wait()
    store.engine.inject(Fault(FaultKind.DELAY, code=300))
    ticket = store.read("w", data)
    print("under way", flush=True)
    ticket.wait()
"""


def test_a_process_that_was_stopped_does_not_blame_the_drive(engine: str, tmp_path: Path) -> None:
    child = children.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path), engine], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "under way\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    child.send_signal(signal.SIGCONT)
    assert child.wait(HANG_S) == 0
    child.stdout.close()


def test_a_read_that_was_written_off_does_not_touch_its_target_later(hasty: DiskStore) -> None:
    """The bytes come late to a buffer of the engine's own, which is not copied to the target any
    more.
    """
    write(hasty, "w", random_bytes(700, 1))
    target = np.zeros(700, dtype=np.uint8)
    hasty.engine.inject(Fault(FaultKind.DELAY, code=900))
    with pytest.raises(StoreTimeout):
        hasty.read("w", target).wait(HANG_S)
    target[:] = 1
    until(lambda: hasty.engine.abandoned_bytes == 0, "the late end")
    assert (target == 1).all()


def test_pieces_that_come_back_short_do_not_add_up(tmp_path: Path) -> None:
    """The ring has places for twice the depth, and no more."""
    depth, most = 2, 0
    with open_store(tmp_path, "io_uring", depth=depth, piece_bytes=PIECE) as store:
        engine: Any = store.engine
        source = random_bytes(100 * PIECE, 1)
        tickets: list[Any] = []
        target = np.zeros_like(source)
        for use, memory in ((store.write, source), (store.read, target)):
            tickets.append(use("w", memory))
            while not tickets[-1].done:
                engine.inject(Fault(FaultKind.SHORT_HALF))
                flying = [seconds for *_, seconds in engine._native.in_flight()]
                most = max(most, sum(seconds >= 0 for seconds in flying))
            engine.inject(HEALTHY)
            tickets[-1].wait(HANG_S)
        assert (target == source).all()
    assert most <= 2 * depth


def test_a_priority_that_is_none_is_refused_below_too(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads") as store:
        native = store.engine._native  # type: ignore[attr-defined]
        for priority in (-1, 3):
            with pytest.raises(ValueError, match="priority"):
                native.submit(1, False, 0, 0, 1, 0, 1, 0, priority)
            with pytest.raises(ValueError, match="priority"):
                native.promote(1, priority)


# --- an end that is interrupted, or late ----------------------------------------------------------


def test_an_interrupted_close_goes_on(engine: str, tmp_path: Path) -> None:
    with nothing_left():
        store = open_store(tmp_path, engine)
        write(store, "w", random_bytes(100, 1))
        stop = store.engine._stop

        def interrupted() -> None:
            store.engine._stop = stop  # type: ignore[method-assign]
            raise KeyboardInterrupt

        store.engine._stop = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            store.close()
        with pytest.raises(StateError, match="store: closed"):
            store.read("w", bytearray(100))
        store.close()


def test_a_closed_store_gives_its_space_back_whoever_has_the_file(
    engine: str, tmp_path: Path
) -> None:
    """As a forked child has it."""
    store = open_store(tmp_path, engine)
    fd = os.dup(store._files[0].fd)
    assert os.fstat(fd).st_blocks > 0
    store.close()
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_registered_memory_lives_as_long_as_the_ring(tmp_path: Path) -> None:
    """Another map would come to lie at its address, and the ring would move the old one's bytes."""
    pool = Pool(MIB, lambda *_: None, Budget())
    arena = weakref.ref(pool._map)
    store = open_store(tmp_path, "io_uring", memory=[pool.buffer()])
    pool.close()
    del pool
    gc.collect()
    assert arena() is not None
    store.close()
    gc.collect()
    assert arena() is None


STUCK = """
import sys, time
import aiofiles.os
from offload.storage import python_engine
from offload.storage.disk import DiskStore

python_engine._write = aiofiles.os.wrap(lambda *_: time.sleep(100))
store = DiskStore(sys.argv[1], 1 << 20, engine="aiofiles", timeout_s=0.2)
ticket = store.write("w", b"bytes")
try:
    ticket.wait()
except OSError as error:
    print(error.errno)
store.close()
"""


def test_a_drive_that_hangs_does_not_hold_the_process_at_its_end(tmp_path: Path) -> None:
    ended = children.run(
        [sys.executable, "-c", STUCK, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.returncode) == (f"{errno.ETIMEDOUT}\n", 0), ended.stderr
