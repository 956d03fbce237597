"""Checks of copies: who waits for whom, and what is counted."""

from __future__ import annotations

import torch
from torch import nn

from . import DeviceModule
from .checks import check, raises


@check
def pinned_copies_are_asynchronous(fake: DeviceModule) -> None:
    fake.set_schedule("lazy")
    host = torch.ones(10).pin_memory()
    assert host.is_pinned() and not torch.ones(10).is_pinned()
    device = torch.empty(10, device="fake")
    device.copy_(host, non_blocking=True)
    host.fill_(2)
    assert device.cpu().eq(2).all(), "the copy reads the host's bytes when it runs"
    device.copy_(host)
    host.fill_(3)
    assert device.cpu().eq(2).all(), "a blocking copy is over when it returns"
    host.copy_(device.add(5), non_blocking=True)
    assert host.eq(3).all()
    torch.accelerator.synchronize()
    assert host.eq(7).all()


@check
def pageable_copies_are_staged(fake: DeviceModule) -> None:
    fake.set_schedule("lazy")
    host = torch.ones(10)
    device = torch.empty(10, device="fake")
    device.copy_(host, non_blocking=True)
    host.fill_(2)
    target = torch.zeros(10)
    target.copy_(device.add(1), non_blocking=True)
    assert target.eq(2).all()
    pinned = torch.ones(4, 4).pin_memory()
    transposed = torch.empty(4, 4, device="fake")
    fake.reset_counters()
    transposed.copy_(pinned.t(), non_blocking=True)  # must be made contiguous first
    transposed.copy_(pinned.double().pin_memory(), non_blocking=True)  # must be converted first
    assert fake.counters()["pageable_bytes"] == 2 * 64


@check
def registered_memory_is_asynchronous(fake: DeviceModule) -> None:
    fake.set_schedule("lazy")
    host = torch.zeros(1000)
    part = host[100:200]
    fake.register_host_memory(part.data_ptr(), 400)
    raises(
        RuntimeError,
        "registered already",
        lambda: fake.register_host_memory(host.data_ptr(), 4000),
    )
    device = torch.empty(100, device="fake")
    device.copy_(part, non_blocking=True)
    part.fill_(4)
    raises(
        RuntimeError, "still use the range", lambda: fake.unregister_host_memory(part.data_ptr())
    )
    assert device.cpu().eq(4).all()
    fake.reset_counters()
    device.copy_(host[150:250], non_blocking=True)  # leaves the range
    assert fake.counters()["pageable_bytes"] == 400
    fake.unregister_host_memory(part.data_ptr())
    raises(RuntimeError, "not the start", lambda: fake.unregister_host_memory(part.data_ptr()))


@check
def registered_storage_is_pinned(fake: DeviceModule) -> None:
    host = torch.zeros(1000)
    fake.register_host_memory(host.data_ptr(), 4000)
    assert host.is_pinned()
    fake.unregister_host_memory(host.data_ptr())
    assert not host.is_pinned()


@check
def pinned_blocks_wait_for_their_copies(fake: DeviceModule) -> None:
    fake.set_schedule("lazy")
    host = torch.full((5000,), 6.0).pin_memory()
    address = host.data_ptr()
    device = host.to("fake", non_blocking=True)
    del host
    other = torch.zeros(5000, pin_memory=True)
    assert other.data_ptr() != address
    assert device.eq(6).all().item()
    assert torch.zeros(5000, pin_memory=True).data_ptr() == address


@check
def counters_count(fake: DeviceModule) -> None:
    torch.accelerator.synchronize()
    pinned, pageable = torch.ones(100).pin_memory(), torch.ones(50)
    side = torch.Stream("fake")
    fake.reset_counters()
    first = torch.empty(100, device="fake")
    first.copy_(pinned, non_blocking=True)
    second = pageable.to("fake")
    second.add_(1).mul_(2)
    first[:50].copy_(second)
    side.wait_event(torch.accelerator.current_stream().record_event())
    pinned.copy_(first)
    second.cpu()
    torch.accelerator.synchronize()
    assert fake.counters() == {
        "h2d_bytes": 600,
        "d2h_bytes": 600,
        "d2d_bytes": 200,
        "pageable_bytes": 400,
        "blocking_copies": 3,
        "host_syncs": 4,
        "kernels": 2,
        "stream_waits": 1,
    }
    assert not any(fake.counters(1).values())
    fake.reset_counters()
    assert not any(fake.counters().values())
    assert first.sum().item() == 250.0 and fake.counters()["host_syncs"] == 1


@check
def data_moves_between_host_and_device(fake: DeviceModule) -> None:
    parameter = nn.Parameter(torch.ones(4))
    host = parameter.data
    parameter.data = torch.full((4,), 2.0, device="fake")
    assert parameter.device.type == "fake" and (parameter * 2).sum().item() == 16
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None and parameter.grad.cpu().eq(4).all()
    parameter.grad = None
    parameter.data = host
    assert parameter.device.type == "cpu" and parameter.sum().item() == 4
    storage = torch.ones(10, device="fake").untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(80)
    assert storage.size() == 80
