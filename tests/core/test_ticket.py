"""Tickets: ended once, waited for once, no error lost, nothing ends early."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from itertools import product
from typing import Any

import pytest

from offload.core.errors import StateError, StoreTimeout
from offload.core.ticket import MOVES, GivenUp, Ticket, TicketState, in_follow_up, split


def failed(error: BaseException) -> Ticket[int]:
    ticket: Ticket[int] = Ticket("read w")
    ticket.fail(error)
    return ticket


def test_a_result_comes_through() -> None:
    ticket: Ticket[int] = Ticket("read w")
    assert not ticket.done
    ticket.finish(7)
    assert ticket.done
    assert ticket.wait() == 7


def test_waiting_blocks_until_another_thread_has_ended_it() -> None:
    ticket: Ticket[str] = Ticket("read w")
    waiting = threading.Event()

    def produce() -> None:
        waiting.wait()
        ticket.finish("bytes")

    thread = threading.Thread(target=produce)
    thread.start()
    waiting.set()
    assert ticket.wait(timeout_s=30) == "bytes"
    thread.join()


def test_an_error_is_raised_in_the_waiting_thread_with_its_origin() -> None:
    def produce(ticket: Ticket[int]) -> None:
        try:
            raise OSError(5, "Input/output error")
        except OSError as error:
            ticket.fail(error)

    ticket: Ticket[int] = Ticket("read w")
    thread = threading.Thread(target=produce, args=(ticket,))
    thread.start()
    thread.join()
    with pytest.raises(OSError, match="Input/output error") as caught:
        ticket.wait()
    names = [frame.name for frame in caught.traceback]
    assert "produce" in names


def test_waiting_twice_is_refused() -> None:
    ticket = Ticket.of(1, "read w")
    ticket.wait()
    with pytest.raises(StateError, match="read w: this ticket has been waited for already"):
        ticket.wait()
    chained = Ticket.of(1, "read v")
    chained.then(lambda x: x)
    with pytest.raises(StateError, match=r"read v: .*already"):
        chained.wait()


def test_ending_twice_is_refused() -> None:
    for first, second in product(("finish", "fail"), repeat=2):
        ticket: Ticket[Any] = Ticket("read w")
        getattr(ticket, first)(OSError("one"))
        with pytest.raises(StateError, match="is not a legal move"):
            getattr(ticket, second)(OSError("two"))
        with pytest.raises(OSError, match="one") if first == "fail" else _nothing():
            ticket.wait()


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def test_the_table_of_moves_is_whole() -> None:
    assert set(MOVES) == set(TicketState)
    assert MOVES[TicketState.COLLECTED] == set()


def test_a_time_out_tells_what_is_in_flight_and_leaves_the_ticket() -> None:
    ticket: Ticket[int] = Ticket("read w", describe=lambda: "1 read of 4 MiB at 0")
    with pytest.raises(
        StoreTimeout, match=r"read w: not done after 0\.01 s; in flight: 1 read of 4 MiB at 0"
    ):
        ticket.wait(timeout_s=0.01)
    ticket.finish(3)
    assert ticket.wait() == 3


def test_then_runs_after_and_only_after() -> None:
    order: list[str] = []
    first: Ticket[int] = Ticket("read w")
    second = first.then(lambda x: (order.append("second"), x + 1)[1], "add")
    third = second.then(lambda x: x * 10, "multiply")
    assert order == []
    first.finish(4)
    assert third.wait() == 50
    assert order == ["second"]


def test_then_follows_a_ticket_that_the_action_returns() -> None:
    inner: Ticket[str] = Ticket("copy w")
    outer = Ticket.of(1).then(lambda _: inner, "read and copy w")
    assert not outer.done
    inner.finish("on device")
    assert outer.wait() == "on device"
    broken: Ticket[str] = Ticket("copy v")
    outer = Ticket.of(1).then(lambda _: broken)
    broken.fail(OSError("copy failed"))
    with pytest.raises(OSError, match="copy failed"):
        outer.wait()


def test_a_failure_skips_what_should_follow() -> None:
    called: list[int] = []
    chain = failed(OSError("lost")).then(called.append).then(called.append)
    with pytest.raises(OSError, match="lost"):
        chain.wait()
    assert called == []


def test_an_error_in_what_follows_fails_its_ticket() -> None:
    chain = Ticket.of(0).then(lambda x: 1 // x)
    with pytest.raises(ZeroDivisionError):
        chain.wait()


def test_an_action_that_returns_a_used_ticket_fails_what_follows() -> None:
    used = Ticket.of(1, "read v")
    used.wait()
    first: Ticket[int] = Ticket("read w")
    chain = first.then(lambda _: used)
    first.finish(1)  # in the thread of a producer, which must go on
    with pytest.raises(StateError, match=r"read v: .*already"):
        chain.wait(timeout_s=30)


def test_a_chain_may_be_longer_than_the_stack() -> None:
    count, first = 3 * sys.getrecursionlimit(), urgent("read w", [])
    chain: Ticket[int] = first
    for _ in range(count):
        chain = chain.then(lambda x: Ticket.of(x + 1))
    assert chain.wait(timeout_s=30) == count + 1, "to urge it takes the way back"
    ended: Ticket[int] = Ticket.of(0)

    def again(x: int) -> Any:
        return x if x == count else Ticket.of(x + 1).then(again)

    assert ended.then(again).wait(timeout_s=30) == count


def test_nothing_waits_in_a_follow_up() -> None:
    """Its thread may be the only one that could end what it waits for."""
    first: Ticket[int] = Ticket("read w")
    other: Ticket[int] = Ticket("read v")

    def act(_: int) -> int:
        assert in_follow_up()
        return other.wait()

    chain = first.then(act)
    assert not in_follow_up()
    first.finish(1)
    assert not in_follow_up()
    with pytest.raises(StateError, match=r"read v: waited for in a follow-up.*return the ticket"):
        chain.wait(timeout_s=30)
    other.finish(7)
    assert Ticket.of(1).then(act).wait() == 7, "what has ended may be collected"


def test_a_follow_up_is_called_although_the_one_before_was_interrupted() -> None:
    """As by a signal handler that raises where no action is being run."""
    tickets: list[Ticket[int]] = [Ticket(f"read {i}") for i in range(3)]

    def interrupted() -> None:
        for ticket in tickets[1:]:
            ticket.finish(1)
        raise KeyboardInterrupt

    tickets[0]._call_at_end(interrupted)
    chains = [ticket.then(lambda x: x + 1) for ticket in tickets[1:]]
    with pytest.raises(KeyboardInterrupt):
        tickets[0].finish(0)
    assert [chain.wait(timeout_s=30) for chain in chains] == [2, 2]
    assert not in_follow_up()


# --- a wait that was interrupted ------------------------------------------------------------------


def test_an_interrupted_wait_leaves_the_ticket() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ticket: Ticket[int] = Ticket("read w")
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        here = threading.get_ident()
        threading.Timer(0.05, lambda: signal.pthread_kill(here, signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait(timeout_s=30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    ticket.finish(3)
    assert ticket.wait() == 3


def test_an_interruption_behind_the_gate_leaves_the_ticket() -> None:
    class Gate:
        """A gate that lets through and is interrupted, as by a signal that comes in this moment."""

        def acquire(self, *_: object) -> bool:
            ticket.finish(3)
            raise KeyboardInterrupt

        def release(self) -> None: ...

    ticket: Ticket[int] = Ticket("read w")
    ticket._gate = Gate()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert ticket.wait(timeout_s=30) == 3


def test_a_wait_of_any_length() -> None:
    for timeout_s in (float("inf"), 1e12, threading.TIMEOUT_MAX * 2):
        urged: list[str] = []
        assert urgent("read w", urged).wait(timeout_s) == 1
    ticket: Ticket[int] = Ticket("read w")
    with pytest.raises(TypeError):
        ticket.wait("5")  # type: ignore[arg-type]
    ticket.finish(3)
    assert ticket.wait() == 3


def test_an_error_that_nobody_waits_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    ticket = failed(OSError("disk on fire"))
    del ticket
    gc.collect()
    (report,) = seen
    assert "read w: never waited for" in report.err_msg
    assert str(report.exc_value) == "disk on fire"


def test_the_report_without_a_hook_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own hook refuses what other code has made; the error is printed all the same."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    ticket = failed(OSError("disk on fire"))
    del ticket
    printed = capsys.readouterr().err
    assert "read w: never waited for" in printed
    assert "OSError: disk on fire" in printed
    assert "TypeError" not in printed


def test_an_error_that_was_raised_is_not_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    ticket = failed(OSError("disk on fire"))
    with pytest.raises(OSError, match="disk on fire"):
        ticket.wait()
    del ticket
    gc.collect()
    assert seen == []


def test_an_error_goes_with_its_handler() -> None:
    """Its traceback must not lead back to it: it has all that the waiting frames had."""
    import weakref

    class Lost(OSError): ...

    error = Lost("lost")
    gone = weakref.ref(error)
    ticket = failed(error)
    del error
    gc.disable()
    try:
        with contextlib.suppress(Lost):
            ticket.wait()
        assert gone() is None
    finally:
        gc.enable()


def test_a_ticket_that_is_kept_does_not_keep_its_result() -> None:
    class Buffer: ...

    import weakref

    buffer = Buffer()
    gone = weakref.ref(buffer)
    ticket = Ticket.of(buffer)
    ticket.wait()
    del buffer
    gc.collect()
    assert gone() is None


def test_many_threads_end_and_chain_at_the_same_time() -> None:
    """A chain that is attached while the ticket ends runs exactly once."""
    for _ in range(300):
        ticket: Ticket[int] = Ticket("race")
        calls: list[int] = []
        gate = threading.Barrier(2)

        def end(ticket: Ticket[int] = ticket, gate: threading.Barrier = gate) -> None:
            gate.wait()
            ticket.finish(1)

        thread = threading.Thread(target=end)
        thread.start()
        gate.wait()
        chained = ticket.then(lambda x, calls=calls: calls.append(x))
        chained.wait(timeout_s=30)
        thread.join()
        assert calls == [1]


# --- urging: a thread waits, so the producer may hurry --------------------------------------------


def urgent(what: str, urged: list[str]) -> Ticket[int]:
    ticket: Ticket[int] = Ticket(what)

    def urge() -> None:
        urged.append(what)
        if not ticket.done:
            ticket.finish(len(urged))

    ticket.urge = urge
    return ticket


def test_waiting_urges_and_nothing_else_does() -> None:
    urged: list[str] = []
    ticket = urgent("read w", urged)
    assert not ticket.done
    assert ticket.state is TicketState.PENDING
    assert urged == []
    assert ticket.wait(timeout_s=30) == 1
    assert urged == ["read w"]


def test_what_has_ended_is_not_urged() -> None:
    urged: list[str] = []
    ticket = urgent("read w", urged)
    ticket.finish(7)
    assert ticket.wait() == 7
    assert urged == []


def test_waiting_for_a_chain_urges_what_it_waits_for() -> None:
    urged: list[str] = []
    second = urgent("copy w", urged)
    chain = urgent("read w", urged).then(lambda _: second).then(lambda x: 10 * x)
    assert urged == []
    assert chain.wait(timeout_s=30) == 20
    assert urged == ["read w", "copy w"], "the second one has begun while somebody waits already"


def test_a_chain_that_has_moved_on_urges_its_present_act() -> None:
    urged: list[str] = []
    first: Ticket[int] = Ticket("read w")
    chain = first.then(lambda _: urgent("copy w", urged))
    first.finish(1)
    assert urged == []
    assert chain.wait(timeout_s=30) == 1
    assert urged == ["copy w"]


def test_a_second_attempt_to_wait_urges_again() -> None:
    count: list[int] = []
    ticket: Ticket[int] = Ticket("read w")
    ticket.urge = lambda: count.append(1)
    for _ in range(2):
        with pytest.raises(StoreTimeout):
            ticket.wait(timeout_s=0.01)
    assert len(count) == 2
    ticket.finish(1)
    assert ticket.wait() == 1


def test_what_has_ended_refers_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer refers to its ticket and the ticket to its producer: both are freed without a
    garbage collection, and the error is reported.
    """
    import weakref

    class Producer:
        def __init__(self) -> None:
            self.ticket: Ticket[int] = Ticket("read w")
            self.ticket.urge = self.hurry

        def hurry(self) -> None: ...

    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    gc.collect()
    gc.disable()
    try:
        producers = [Producer() for _ in range(3)]
        gone = [weakref.ref(producer) for producer in producers]
        chain = producers[1].ticket.then(lambda x: x)
        both = split(producers[2].ticket)
        for i, producer in enumerate(producers):
            producer.ticket.fail(OSError(f"error {i}"))
        del producer
        producers.clear()
        assert gone[0]() is None
        assert [str(report.exc_value) for report in seen] == ["error 0"]
        for ticket in (chain, *both):
            with pytest.raises(OSError, match="error"):
                ticket.wait()
    finally:
        gc.enable()


def test_a_ticket_that_is_split_ends_for_both() -> None:
    whole: Ticket[int] = Ticket("an act")
    urged: list[int] = []
    whole.urge = lambda: urged.append(1)
    first, second = split(whole)
    assert not first.done and not second.done
    with pytest.raises(StoreTimeout):
        second.wait(0.0)
    assert urged  # a wait for either one hurries the act
    with pytest.raises(StateError, match="already"):
        whole.wait()
    whole.finish(7)
    assert (first.wait(), second.wait()) == (7, 7)
    failing: Ticket[int] = Ticket("another")
    first, second = split(failing)
    failing.fail(ValueError("no"))
    for one in (first, second):
        with pytest.raises(ValueError, match="no"):
            one.wait()


def test_what_was_given_up_with_its_owner_is_told_to_those_who_wait_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ticket: Ticket[None] = Ticket("a write")
    ticket.fail(GivenUp("a write: the store was closed before it was done"))
    with pytest.raises(StateError, match="was closed"):
        ticket.wait()
    unheard: Ticket[None] = Ticket("another")
    unheard.fail(GivenUp("another: the store was closed before it was done"))
    del unheard
    assert capsys.readouterr().err == ""
