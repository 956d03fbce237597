"""Activations of a model on a device: in host memory, and beyond it on disk: the same bits under
every schedule.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DeviceModule
from support.bits import same_tensors
from support.device.transfer_cases import register
from support.stores import chunks_of
from torch import Tensor, nn

from offload.core.budget import Budget
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.device.device import DeviceTransfer
from offload.params import activations
from offload.params.activation_store import HostActivations
from offload.params.activations import Activations
from offload.storage import growing
from offload.storage.growing import GrowingStore

KI = 1 << 10
ROWS = 64
PIECE = ROWS * 64 * 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", KI)
    monkeypatch.setattr(growing, "FIRST_BYTES", 64 * KI)


@contextmanager
def offloaded(
    nbytes: int, folder: Path | None, strict: bool = False
) -> Iterator[tuple[Activations, HostActivations]]:
    """Offload the tensors that autograd saves in the block, with so much host memory."""
    metrics = Metrics(strict=strict)
    transfer = DeviceTransfer("fake", reads_in_flight_bytes=2 * PIECE, metrics=metrics)
    store = GrowingStore([folder], metrics) if folder else None
    outside = HostActivations(transfer, Pool(nbytes, register, Budget(), transfer.device), store)
    made = Activations(outside, transfer.device, metrics)

    def pack(tensor: Tensor) -> Any:
        return made.save(tensor) or tensor.detach()

    def unpack(kept: Any) -> Tensor:
        found: Tensor = kept if isinstance(kept, Tensor) else kept.checked()
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield made, outside
    made.close()
    transfer.close()


class Net(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)).to(device)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * torch.sigmoid(x)
        return x.square().mean()


def gradients(net: Net, x: Tensor, times: int = 1) -> list[Tensor]:
    loss = net(x)
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    found = [p.grad.cpu() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


@pytest.mark.parametrize("pieces", [6, 100])
def test_the_same_bits(pieces: int, fake: DeviceModule, tmp_path: Path) -> None:
    """In little host memory, most of them on disk; in enough, none."""
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1)).to("fake")
    net = Net("fake")
    expected = [gradients(net, x * n, 1 + n % 2) for n in range(1, 4)]
    with offloaded(pieces * PIECE, tmp_path) as (made, outside):
        for n in range(1, 4):
            assert same_tensors(gradients(net, x * n, 1 + n % 2), expected[n - 1])
        loss = net(x)
        assert 0 < made.host_bytes <= pieces * PIECE and (made.disk_bytes > 0) is (pieces == 6)
        del loss
        gc.collect()
        made._take_in_ended()
        assert not made._away and made._held_bytes == 0
        counts = made._metrics.snapshot().counts
        assert ("disk_written_bytes" in counts) is (pieces == 6)
        assert is_empty(outside)


def is_empty(outside: HostActivations) -> bool:
    """Return whether all host memory is free within 20 s, also that of copies that were in flight
    when their tensor was dropped.
    """
    end_s = time.monotonic() + 20.0
    while outside._pool.stats().used_bytes and time.monotonic() < end_s:
        torch.accelerator.synchronize()
        outside._transfer.poll()
        outside._take_in_over()
        time.sleep(0.01)
    return outside._pool.stats().used_bytes == 0


def test_device_memory_goes_down_and_nothing_is_pageable(
    fake: DeviceModule, tmp_path: Path
) -> None:
    x, net = torch.ones(ROWS, 64).to("fake"), Net("fake")
    kept = {}
    before = torch.accelerator.memory_allocated()
    loss = net(x)
    kept["keep"] = torch.accelerator.memory_allocated() - before
    del loss
    with offloaded(100 * PIECE, None, strict=True) as (_made, outside):
        fake.reset_counters()
        loss = net(x)
        torch.accelerator.synchronize()
        counted = fake.counters()
        assert counted["pageable_bytes"] == counted["blocking_copies"] == 0
        outside._transfer.poll()  # what has been copied is let go
        kept["offload"] = torch.accelerator.memory_allocated() - before
        loss.backward()
        counted = fake.counters()
        assert counted["pageable_bytes"] == counted["blocking_copies"] == 0
        net.zero_grad()
        del loss
    assert kept["offload"] < kept["keep"] / 2


def test_without_a_drive_the_rest_stays(fake: DeviceModule) -> None:
    x, net = torch.ones(ROWS, 64).to("fake"), Net("fake")
    expected = gradients(net, x)
    with offloaded(4 * PIECE, None) as (made, _activation_store):
        assert same_tensors(gradients(net, x), expected)
        assert "offload of activations" in made._metrics.snapshot().fallbacks


def test_a_loss_that_is_dropped_leaves_nothing(fake: DeviceModule, tmp_path: Path) -> None:
    x, net = torch.ones(ROWS, 64).to("fake"), Net("fake")
    with offloaded(4 * PIECE, tmp_path) as (made, outside):
        before = torch.accelerator.memory_allocated()
        for _ in range(3):
            net(x)
        torch.accelerator.synchronize()
        made._take_in_ended()
        assert made._held_bytes == 0 and outside._store is not None
        assert is_empty(outside) and chunks_of(outside._store) == 0
        assert torch.accelerator.memory_allocated() == before


@pytest.mark.parametrize("pieces", [12, 100])
def test_what_has_come_back_goes_again(pieces: int, fake: DeviceModule, tmp_path: Path) -> None:
    """A graph that is kept, while others run and are kept as well."""
    x, net = torch.ones(ROWS, 64).to("fake"), Net("fake")

    def run() -> list[Tensor]:
        losses, found = [net(x * n) for n in (1, 2)], []
        for number in (0, 1, 0, 0, 1):
            losses[number].backward(retain_graph=True)
            losses.append(net(x * 3))
            found += [p.grad.cpu() for p in net.parameters() if p.grad is not None]
            net.zero_grad()
        for loss in losses:
            loss.backward()
        found += [p.grad.cpu() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        return found

    expected = run()
    with offloaded(pieces * PIECE, tmp_path) as (made, outside):
        before = torch.accelerator.memory_allocated()
        assert same_tensors(run(), expected)
        gc.collect()
        made._take_in_ended()
        assert made._held_bytes == 0 and is_empty(outside)
        assert outside._transfer.memory.used_bytes == 0
        assert torch.accelerator.memory_allocated() <= before
