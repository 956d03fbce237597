"""Shards of DTensors on a device: updated through staging buffers, at the step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import DeviceModule
from support.device.transfer_cases import register
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import offload
from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.distributed.placing import like
from offload.optim import coordinator
from offload.planning import planner

SIZES = ((70, 30), (5,), (40, 41))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def placed(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """Make a DTensor with its local part on the device, though the mesh is the CPU's: the fake
    device has no collectives.
    """
    template = distribute_tensor(torch.empty(value.shape), mesh, [Shard(0)])
    made = like(template, value.to("fake"))
    assert isinstance(made, DTensor)
    return made


def values(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 1024)
    monkeypatch.setattr(coordinator, "Pool", partial(Pool, register=register))


def test_shards_on_a_device(fake: DeviceModule, mesh: DeviceMesh) -> None:
    """The device computes gradients until the very moment of the step."""
    for dtype in (torch.float32, torch.bfloat16):
        plain = [nn.Parameter(one) for one in values(0, dtype)]
        params = [nn.Parameter(placed(one.detach(), mesh)) for one in plain]
        optimizers = [offload.wrap(torch.optim.AdamW(each)) for each in (params, plain)]
        assert not offload.report(optimizers[0]).plan.has_grad_buffers
        for turn in range(3):
            for param, host, grad in zip(params, plain, values(turn + 1, dtype), strict=True):
                there = param._local_tensor
                param.grad = like(param, (grad.to(there.device) + there) * 1)
                host.grad = (grad + host.detach()) * 1
            for optimizer in optimizers:
                optimizer.step()
            for param, host in zip(params, plain, strict=True):
                assert torch.equal((param._local_tensor * 2).cpu(), host.detach() * 2)
        ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
        for number, state in theirs.items():
            for key, value in state.items():
                got = ours[number][key]
                assert torch.equal(got._local_tensor if isinstance(got, DTensor) else got, value)
        for optimizer in optimizers:
            optimizer.close()
        assert optimizers[0].state[params[0]]["exp_avg"]._local_tensor.device.type == "fake"
