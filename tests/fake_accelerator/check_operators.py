"""Checks of operators: random numbers, views, shapes that depend on data, training."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import DeviceModule
from .checks import check


@check
def random_numbers_follow_the_seed(fake: DeviceModule) -> None:
    def draws() -> list[torch.Tensor]:
        torch.manual_seed(5)
        side = torch.Stream("fake")
        first = torch.randn(10, device="fake")
        with side:
            second = torch.rand(10, device="fake")
        third = nn.functional.dropout(torch.ones(50, device="fake"))
        permuted = torch.randperm(9, device="fake")
        side.synchronize()
        return [one.cpu() for one in (first, second, third, permuted)]

    host = torch.get_rng_state()
    state = fake.get_rng_state()
    one = draws()
    assert all(torch.equal(a, b) for a, b in zip(one, draws(), strict=True))
    fake.set_schedule("eager")
    assert all(torch.equal(a, b) for a, b in zip(one, draws(), strict=True))
    assert not torch.equal(one[0], one[1]) and one[2].eq(0).any() and one[2].eq(2).any()
    assert one[3].sort().values.tolist() == list(range(9))
    torch.set_rng_state(host)
    torch.randn(3, device="fake").cpu()
    assert torch.equal(torch.get_rng_state(), host), "the host's generator is left alone"
    fake.set_rng_state(state)
    expected = torch.randn(3, device="fake").cpu()
    fake.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="fake").cpu(), expected)
    own = torch.Generator("fake").manual_seed(1)
    assert torch.randn(3, device="fake", generator=own).isfinite().all().item()


@check
def autocast_uses_the_lower_type(fake: DeviceModule) -> None:
    layer = nn.Linear(4, 4, device="fake")
    inputs = torch.ones(2, 4, device="fake")
    with torch.autocast("fake", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
        assert layer(inputs).softmax(1).dtype == torch.float32
        assert torch.cat([layer(inputs), inputs]).dtype == torch.float32
    assert layer(inputs).dtype == torch.float32


@check
def convolutions_train_as_on_the_host(fake: DeviceModule) -> None:
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(1)
        layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5))
        data, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
        model, data, labels = model.to(device), data.to(device), labels.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(data), labels).backward()
            optimizer.step()
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])

    torch.testing.assert_close(train("fake"), train("cpu"))


@check
def views_share_memory(fake: DeviceModule) -> None:
    base = torch.zeros(4, 6, device="fake")
    base.view(3, 8)[0].add_(1)
    base.t()[5].fill_(7)
    base.as_strided((2,), (1,), 20).mul_(0).add_(9)
    base.unfold(1, 2, 2)[2].sub_(1)
    base[1:2].copy_(torch.full((6,), 5.0))
    host = torch.zeros(4, 6)
    host.view(3, 8)[0].add_(1)
    host.t()[5].fill_(7)
    host.as_strided((2,), (1,), 20).mul_(0).add_(9)
    host.unfold(1, 2, 2)[2].sub_(1)
    host[1:2].copy_(torch.full((6,), 5.0))
    assert torch.equal(base.cpu(), host)
    out = torch.empty(0, device="fake")
    assert torch.mm(base, base.t(), out=out) is out and out.shape == (4, 4)
    torch.testing.assert_close(out.cpu(), host @ host.t())
    wrong = torch.empty(3, device="fake")
    torch.add(base, 1, out=wrong.resize_(0))
    assert torch.equal(wrong.cpu(), host + 1)


@check
def shapes_from_data_wait(fake: DeviceModule) -> None:
    host = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 3.0]])
    device = host.to("fake")
    fake.reset_counters()
    assert torch.equal(device.nonzero().cpu(), host.nonzero())
    assert torch.equal(device[device > 0].cpu(), host[host > 0])
    assert torch.equal(device.masked_select(device < 0).cpu(), host.masked_select(host < 0))
    assert torch.equal(torch.unique(device).cpu(), torch.unique(host))
    assert fake.counters()["host_syncs"] >= 8
    assert torch.equal(device, device.clone()) and bool((device > 4).any())
    device[device > 2] = 0
    assert device.sum().item() == -5.0


@check
def tensors_can_be_saved_and_copied(fake: DeviceModule) -> None:
    tensor = torch.arange(6.0, device="fake").view(2, 3)
    twin = copy.deepcopy(nn.Parameter(tensor))
    tensor.zero_()
    assert twin.sum().item() == 15 and twin.device.type == "fake"
    file = io.BytesIO()
    torch.save({"a": twin}, file)
    file.seek(0)
    assert torch.load(file)["a"].device.type == "fake"
    file.seek(0)
    assert torch.load(file, map_location="cpu")["a"].sum().item() == 15
    assert "device='fake:0'" in repr(tensor)


@check
def gradients_can_be_taken_in_hooks(fake: DeviceModule) -> None:
    layer, inputs = nn.Linear(4, 4), torch.randn(2, 4)
    twin = copy.deepcopy(layer).to("fake")
    taken = {}

    def take(parameter: torch.Tensor) -> None:
        taken[parameter] = parameter.grad
        parameter.grad = None

    for parameter in twin.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    twin(inputs.to("fake")).tanh().sum().backward()
    layer(inputs).tanh().sum().backward()
    for parameter, host in zip(twin.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(taken[parameter].cpu(), host.grad)


@check
def checkpoints_and_saved_tensors(fake: DeviceModule) -> None:
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4)).to("fake")

    def gradients(mode: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        inputs = torch.ones(8, 4, device="fake", requires_grad=True)
        layers.zero_grad()
        if mode == "checkpoint":
            output = checkpoint(layers, inputs, use_reentrant=False)
        elif mode == "host":
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                output = layers(inputs)
        else:
            output = layers(inputs)
        output.sum().backward()
        assert inputs.grad is not None
        return [inputs.grad.cpu(), *(p.grad.cpu() for p in layers.parameters())]

    plain = gradients("plain")
    torch.testing.assert_close(gradients("checkpoint"), plain, rtol=0, atol=0)
    torch.testing.assert_close(gradients("host"), plain)  # layouts differ, so the rounding does


@check
def fused_optimizers_have_the_bits_of_the_host(fake: DeviceModule) -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        host = [torch.linspace(-1, 1, 100).requires_grad_()]
        device = [host[0].detach().to("fake").requires_grad_()]
        for parameters in (host, device):
            optimizer = kind(parameters, lr=0.01, fused=True)
            for step in range(3):
                parameters[0].grad = parameters[0].detach() * (step + 1)
                optimizer.step()
        assert torch.equal(host[0], device[0].cpu()), kind
