"""Checks of streams, events, devices and late errors."""

from __future__ import annotations

import threading

import torch

from . import DeviceModule
from .checks import check, raises


def is_late(stream: torch.Stream) -> bool:
    """Return whether work on the stream still waits. Asking makes it advance, so use it once."""
    return not stream.query()


@check
def streams_and_events(fake: DeviceModule) -> None:
    default = torch.accelerator.current_stream()
    side = torch.Stream("fake")
    event = torch.Event("fake")
    assert event.query(), "an event that was never recorded is complete"
    value = torch.zeros(10, device="fake")
    side.wait_stream(default)
    with side:
        assert torch.accelerator.current_stream() == side
        value.add_(1)
        event.record(side)
    assert torch.accelerator.current_stream() == default
    default.wait_event(event)
    value.mul_(3)
    later = default.record_event()
    polls = 0
    while not later.query():
        polls += 1
        assert polls < 100
    assert later.query() and event.query()
    later.synchronize()
    side.synchronize()
    assert value.cpu().eq(3).all()
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(default)
    assert default.device.type == "fake" and default.stream_id == 0


@check
def late_streams_are_late(fake: DeviceModule) -> None:
    fake.set_schedule("seeded", 0b10)  # the default stream late, the first side stream early
    side = torch.Stream("fake")
    value = torch.zeros(10, device="fake")
    assert is_late(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    with side:
        value.add_(1)
    assert not is_late(side)
    fake.set_schedule("lazy")
    with side:
        value.add_(1)
    value.add_(1)
    torch.accelerator.current_stream().synchronize()
    assert is_late(side), "a host that waits for one stream does not make others run"


@check
def errors_come_with_the_next_wait(fake: DeviceModule) -> None:
    table = torch.ones(4, 4, device="fake")
    bad = torch.tensor([99], device="fake")
    result = table.index_select(0, bad)
    assert result.shape == (1, 4)
    raises(IndexError, "out of range", torch.accelerator.synchronize)
    torch.accelerator.synchronize()
    assert result.isnan().all().item() and table.sum().item() == 16
    raises(RuntimeError, "", lambda: table @ torch.ones(3, 3, device="fake"))
    torch.accelerator.synchronize()


@check
def two_devices(fake: DeviceModule) -> None:
    assert torch.accelerator.device_count() == 2
    first = torch.full((10,), 2.0, device="fake:0")
    second = first.to("fake:1", non_blocking=True) * 4
    assert second.device == torch.device("fake:1") and second.sum().item() == 80
    raises(RuntimeError, "same device", lambda: first + second)
    raises(RuntimeError, "same device", lambda: torch.cat([first, second]))
    raises(RuntimeError, "same device", lambda: first.add_(torch.ones(10)))
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="fake").device.index == 1
        assert torch.accelerator.current_stream().device.index == 1
        assert fake.counters(0)["h2d_bytes"] == 0
    assert torch.empty(1, device="fake").device.index == 0
    first.copy_(second)
    torch.accelerator.synchronize(0)
    assert first.cpu().eq(8).all()


@check
def backward_runs_on_the_streams_of_forward(fake: DeviceModule) -> None:
    side = torch.Stream("fake")
    weight = torch.full((3, 3), 0.5, device="fake", requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        middle = (weight @ weight).tanh()
    middle.record_stream(torch.accelerator.current_stream())
    torch.accelerator.current_stream().wait_stream(side)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    (middle * weight).sum().backward()
    host = torch.full((3, 3), 0.5, requires_grad=True)
    ((host @ host).tanh() * host).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.cpu(), host.grad)


@check
def threads_do_not_disturb_each_other(fake: DeviceModule) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.Stream("fake"):
                for turn in range(20):
                    host = torch.full((64,), float(number + turn)).pin_memory()
                    device = host.to("fake", non_blocking=True) * 2 + 1
                    assert device.sum().item() == 64 * (2 * (number + turn) + 1)
                    leaf = torch.ones(4, 4, device="fake", requires_grad=True)
                    (leaf @ leaf).sum().backward()
                    assert leaf.grad is not None and leaf.grad.sum().item() == 128
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures
