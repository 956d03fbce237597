"""The transfer layer: the same bits under every schedule and on the CPU, no wait of the CPU's that
is not written down, no byte over the budget.
"""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule
from support.device.transfer_cases import (
    CASES,
    SIZE,
    WAIT_S,
    WIDTH,
    bench,
    matrix,
    read_in_parts,
    run,
)

from offload.core.errors import CapacityError, ConfigError, StateError, StoreTimeout
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket, TicketState
from offload.device import device
from offload.device.device import DeviceTransfer
from offload.device.host import HostTransfer, open_transfer


@functools.cache
def on_the_cpu(case: Callable) -> bytes:
    return run(case, None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_bits_are_those_of_the_cpu(fake: DeviceModule, case: Callable) -> None:
    assert run(case, device) == on_the_cpu(case)
    assert run(case, device) == on_the_cpu(case)


def test_a_step_waits_only_where_it_is_written_down(fake: DeviceModule) -> None:
    """Fetches, use, reads, writes: nothing pageable, nothing blocking, no wait of the CPU's until a
    ticket is waited for; then one for each part.
    """
    with bench(device) as b:
        weight = torch.ones(WIDTH, WIDTH, device="fake")
        hosts = [b.random(WIDTH, WIDTH) for _ in range(3)]
        target = b.host(WIDTH, WIDTH)
        fake.reset_counters()
        buffers = [b.transfer.fetch(host) for host in hosts]
        for buffer in buffers:
            weight = weight @ matrix(buffer)
            buffer.release()
        tickets = read_in_parts(b.transfer, weight, target, 256)
        b.transfer.write(hosts[0], torch.empty_like(weight), b.transfer.mark())
        b.transfer.join()
        counted = fake.counters()
        assert counted["host_syncs"] == counted["blocking_copies"] == counted["pageable_bytes"] == 0
        assert counted["h2d_bytes"] == 4 * SIZE and counted["d2h_bytes"] == SIZE
        assert [ticket.wait().numel() for ticket in tickets] == [64] * 4
        assert fake.counters()["host_syncs"] <= 4
        counts = b.transfer.metrics.snapshot().counts
        assert counts == {"host_to_device_bytes": 4 * SIZE, "device_to_host_bytes": SIZE}


def test_the_budget_is_never_exceeded(fake: DeviceModule) -> None:
    """The device has not a byte more than the budget, and the CPU never waits: memory of what is
    still in use on the device is not given out, and what is given back can be had at once.
    """
    draw, unit = random.Random(5), 4096
    budget = 6 * unit
    with bench(device, budget_bytes=budget) as b:
        hosts = [b.host(unit // 4).fill_(number) for number in range(10)]
        total = torch.zeros(unit // 4, device="fake")
        scratch = torch.empty_like(total)
        fake.set_budget(budget + total.nbytes + scratch.nbytes)
        fake.reset_counters()
        torch.accelerator.reset_peak_memory_stats()
        held: list = []
        expected = torch.zeros(unit // 4)
        for _ in range(60):
            if len(held) == 6:
                with pytest.raises(CapacityError, match="0 B of 24 KiB are free"):
                    b.transfer.fetch(hosts[0])
                number, buffer = held.pop(draw.randrange(6))
                for _ in range(draw.randrange(3)):
                    torch.add(total, buffer.use().view(torch.float32), out=total)
                    expected += number
                assert buffer.release() and buffer.release()
            number = draw.randrange(10)
            held.append((number, b.transfer.fetch(hosts[number])))
            assert b.transfer.memory.used_bytes == unit * len(held) <= budget
        assert fake.counters()["host_syncs"] == 0
        assert b.transfer.memory.peak_bytes == budget
        assert torch.accelerator.max_memory_allocated() <= budget + total.nbytes + scratch.nbytes
        assert torch.equal(total.cpu(), expected)
        held.clear()
        gc.collect()
        assert b.transfer.memory.used_bytes == 0


def test_reads_in_flight_are_bounded(fake: DeviceModule) -> None:
    """The device has room for three gradients; ten are made and read, and the CPU does not wait."""
    nbytes = 4096
    with bench(device, reads_in_flight_bytes=nbytes) as b:
        hosts = [b.host(nbytes // 4) for _ in range(10)]
        torch.accelerator.synchronize()
        fake.set_budget(torch.accelerator.memory_allocated() + 3 * nbytes)
        fake.reset_counters()
        tickets = []
        for number, host in enumerate(hosts):
            gradient = torch.full((nbytes // 4,), float(number), device="fake")
            tickets.append(b.transfer.read(gradient, host))
            del gradient
        assert fake.counters()["host_syncs"] == 0
        for number, ticket in enumerate(tickets):
            assert ticket.wait(WAIT_S).eq(number).all()


def test_a_view_that_escapes_keeps_its_memory_and_counts(fake: DeviceModule) -> None:
    with bench(device, budget_bytes=2 * SIZE) as b:
        buffer = b.transfer.fetch(b.host(WIDTH, WIDTH).fill_(3.0))
        view = matrix(buffer)[0]
        assert not buffer.release()
        assert b.transfer.memory.used_bytes == SIZE
        assert view.cpu().eq(3).all()
        del view
        assert b.transfer.memory.used_bytes == 0


def test_a_block_is_filled_in_another_thread(fake: DeviceModule) -> None:
    """As when a read from the disk ends: the thread that fills has no stream of its own to use."""
    with bench(device) as b:
        buffer, host = b.transfer.allocate(4 * 100), b.host(100).fill_(2.0)
        thread = threading.Thread(target=lambda: buffer.fill(host).then(lambda _: host.fill_(9.0)))
        thread.start()
        thread.join()
        assert buffer.use().view(torch.float32).sum().item() == 200


def test_a_kernel_that_fails_is_an_error_of_the_ticket(fake: DeviceModule) -> None:
    with bench(device) as b:
        table, index = torch.ones(4, 4, device="fake"), torch.tensor([9]).to("fake")
        try:
            wrong = table[index] + 1
            ticket = b.transfer.read(wrong, b.host(1, 4))
        except (RuntimeError, IndexError):
            return  # an eager stream tells at once
        with pytest.raises((RuntimeError, IndexError), match="index"):
            ticket.wait(WAIT_S)
        assert ticket.state is TicketState.COLLECTED


def test_host_memory_that_is_not_registered_is_told(fake: DeviceModule) -> None:
    with bench(device) as b:
        transfer = DeviceTransfer("fake")
        buffer = transfer.fetch(torch.full((4,), 3.0))
        assert buffer.use().view(torch.float32).cpu().eq(3).all()
        there = torch.zeros(4)
        transfer.read(torch.ones(4, device="fake"), there).wait(WAIT_S)
        assert there.eq(1).all()
        assert list(transfer.metrics.snapshot().fallbacks) == ["copies to and from fake"]
        strict = DeviceTransfer("fake", metrics=Metrics(strict=True))
        with pytest.raises(StateError, match="not registered with the device"):
            strict.fetch(torch.ones(4))
        assert strict.memory.used_bytes == 0
        assert not b.transfer.metrics.snapshot().fallbacks


def test_two_devices(fake: DeviceModule) -> None:
    with bench(device) as b:
        second = DeviceTransfer("fake:1", budget_bytes=512)
        assert b.transfer.device == torch.device("fake:0")
        buffer = second.fetch(b.host(4).fill_(5.0))
        with torch.accelerator.device_index(1):
            doubled = buffer.use().view(torch.float32) * 2
        assert doubled.device == second.device and doubled.cpu().eq(10).all()
        with pytest.raises(ConfigError, match="expected a tensor on fake:0, got fake:1"):
            b.transfer.read(doubled, b.host(4))


def test_nothing_is_a_size_too(fake: DeviceModule) -> None:
    with bench(device, budget_bytes=0) as b:
        buffer = b.transfer.fetch(torch.empty(0))
        numel = buffer.use().numel()
        assert numel == 0 and buffer._loan.filled.query() and buffer.release()
        empty = torch.empty(0, 3, device="fake")
        assert b.transfer.read(empty, torch.empty(0, 3)).wait(WAIT_S).shape == (0, 3)
        assert len(read_in_parts(b.transfer, empty, torch.empty(0, 3), 64)) == 1


def test_threads_keep_their_streams_and_their_order(fake: DeviceModule) -> None:
    """Several threads, each with a device and a stream of its own, fetch, fill, read and wait."""
    with bench(device) as b:
        whole = b.transfer.allocate(4 * 4 * 64)
        failures: list[str] = []

        def work(number: int) -> None:
            torch.accelerator.set_device_index(number % 2)
            mine = torch.Stream("fake:0")
            with torch.accelerator.device_index(0), mine:
                for turn in range(40):
                    buffer = b.transfer.fetch(b.host(64).fill_(number))
                    result = buffer.use().view(torch.float32) * 2
                    ticket = b.transfer.read(result, b.host(64))
                    whole.fill(b.host(64).fill_(number), 4 * 64 * number)
                    if torch.accelerator.current_stream() != mine:
                        failures.append(f"thread {number}, turn {turn}: on another stream")
                    if not ticket.wait(WAIT_S).eq(2 * number).all():
                        failures.append(f"thread {number}, turn {turn}: wrong bytes")
                    buffer.release()
            if torch.accelerator.current_device_index() != number % 2:
                failures.append(f"thread {number}: on another device")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        parts = whole.use().view(torch.float32).cpu().view(4, 64)
        assert [part.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0], [3.0]]


def test_chains_and_groups_end_without_blocking_who_ends_them(
    fake: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that follows something else is not waited for in the thread that ended that."""
    landed_in, land = [], device._Flights.land

    def spy(flights: Any, flight: Any, timeout_s: float | None) -> None:
        landed_in.append(threading.current_thread())
        land(flights, flight, timeout_s)

    monkeypatch.setattr(device._Flights, "land", spy)
    with bench(device) as b:
        source = torch.arange(64.0, device="fake") * 2
        start: Ticket[None] = Ticket("from elsewhere")
        chained = start.then(lambda _: b.transfer.read(source, b.host(64)))
        results: list[torch.Tensor] = []
        waiter = threading.Thread(target=lambda: results.append(chained.wait(10)))
        waiter.start()
        start.finish(None)  # in this thread, which must not wait for the device
        waiter.join(10)
        assert threading.current_thread() not in landed_in
        assert len(results) == 1 and torch.equal(results[0], source.cpu())
        tickets = read_in_parts(b.transfer, source, b.host(64), 4)
        ends = [t.then(lambda part: b.transfer.read(source, b.host(64))) for t in tickets]
        assert all(end.wait(10)[3] == 6 for end in ends)


class Never:
    """An event of a device that hangs."""

    def query(self) -> bool:
        return False


def test_a_wait_has_an_end(fake: DeviceModule) -> None:
    with bench(device) as b:
        ticket = b.transfer.read(torch.ones(4, device="fake"), b.host(4))
        flight = b.transfer._downward.queue[0]
        event, flight.event = flight.event, Never()
        with pytest.raises(StoreTimeout, match="not done after"):
            ticket.wait(0.01)
        flight.event = event
        assert ticket.wait(WAIT_S).eq(1).all()


def test_what_is_over_is_given_back_in_passing(fake: DeviceModule) -> None:
    with bench(device, pool_bytes=4 * 4096) as b:
        for number in range(3):
            buffer = b.transfer.fetch(b.host(8).fill_(number))
        torch.accelerator.synchronize()
        assert buffer._loan.filled.query()
        b.transfer.poll()
        assert b.pool.stats().used_bytes == 0


def test_a_parameter_can_be_written(fake: DeviceModule) -> None:
    with bench(device) as b:
        parameter = torch.nn.Parameter(torch.zeros(4, device="fake"))
        b.transfer.write(b.host(4).fill_(2.0), parameter, b.transfer.mark())
        b.transfer.join()
        assert parameter.detach().cpu().eq(2).all()
        with torch.device("fake"):
            DeviceTransfer("fake").close()


@pytest.fixture
def quiet() -> None:
    from fake_accelerator import load

    load("eager")


def test_bad_calls_are_refused_before_anything_moves(quiet: None) -> None:
    with bench(device, budget_bytes=4096) as b:
        there, host = torch.ones(4, 4, device="fake"), b.host(4, 4).fill_(2.0)
        mark = b.transfer.mark()
        for bad, words in [
            (lambda: b.transfer.read(there.double(), host), "the same shape and dtype"),
            (lambda: b.transfer.read(there.t(), host), "contiguous device tensor"),
            (lambda: b.transfer.read(there[:2], host), r"\(4, 4\) torch.float32 on the host"),
            (lambda: b.transfer.write(host.t(), there, mark), "contiguous host tensor"),
            (lambda: b.transfer.write(there, there, mark), "a tensor in host memory, got fake:0"),
            (lambda: b.transfer.write(host, host, mark), "a tensor on fake:0, got cpu"),
            (lambda: b.transfer.allocate(-1), "0 bytes or more, got -1"),
            (lambda: b.transfer.allocate(64).fill(host, 8), r"\[8, 72\) are not within 64"),
            (lambda: b.transfer.allocate(64).fill(host.t()), "contiguous host tensor"),
            (lambda: DeviceTransfer("meta"), "expected fake here, got meta"),
        ]:
            with pytest.raises(ConfigError, match=words):
                bad()
        with pytest.raises(CapacityError, match=r"embedding needs 5 KiB .* 4 KiB of 4 KiB"):
            b.transfer.allocate(5000, "embedding")
        torch.fake.set_budget(torch.accelerator.memory_reserved() + 512)  # type: ignore[attr-defined]
        with pytest.raises(CapacityError, match="which the device does not have"):
            b.transfer.allocate(4096)
        assert b.transfer.memory.used_bytes == 0 and there.cpu().eq(1).all() and host.eq(2).all()


def test_what_has_ended_is_refused(quiet: None) -> None:
    with bench(device) as b:
        buffer = b.transfer.allocate(64, "layer 3")
        with buffer:
            buffer.use()
        for call in (buffer.use, lambda: buffer.fill(b.host(4))):
            with pytest.raises(StateError, match="layer 3: the device buffer has been released"):
                call()
        other = b.transfer.allocate(64)
        b.transfer.close()
        b.transfer.close()
        for call in (
            lambda: b.transfer.allocate(4),
            lambda: other.fill(b.host(4)),
            lambda: b.transfer.read(torch.ones(4, device="fake"), b.host(4)),
        ):
            with pytest.raises(StateError, match="closed"):
                call()


def test_on_the_cpu_nothing_is_copied() -> None:
    transfer = open_transfer("cpu")
    assert isinstance(transfer, HostTransfer)
    host = torch.arange(6.0).view(2, 3)
    buffer = transfer.fetch(host, "layer 3")
    assert buffer.use().data_ptr() == host.data_ptr() and buffer.release()
    with pytest.raises(StateError, match="layer 3"):
        buffer.use()
    assert transfer.read(host, None).wait() is host
    parts = [ticket.wait() for ticket in read_in_parts(transfer, host, None, 16)]
    assert [part.data_ptr() - host.data_ptr() for part in parts] == [0, 16]
    assert transfer.write(host, host, transfer.mark()).wait() is host
    other = torch.zeros(2, 3)
    transfer.write(host, other, transfer.mark())
    transfer.join()
    transfer.close()
    assert torch.equal(other, host)
    with pytest.raises(ConfigError, match="the same shape"):
        transfer.write(host, other[0], transfer.mark())


def test_the_device_that_is_there_is_opened(quiet: None) -> None:
    opened = open_transfer("fake", 4096)
    assert isinstance(opened, DeviceTransfer) and opened.memory.budget_bytes == 4096
