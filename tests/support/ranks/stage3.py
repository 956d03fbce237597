"""Models, batches and loops for tests of a model that is sharded over ranks (stage 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from offload.params.prepared import Prepared, prepared_of
from support.loops import SEED
from support.models import WIDTH, WORDS, Layer

Model = Callable[[], nn.Module]


class Mixture(nn.Module):
    """A model with experts; which of them run depends on the tokens, and so on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Routed() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, int(tokens.sum()))
        return self.head(x)


class Routed(nn.Module):
    """A layer with experts, of which the last one never runs on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.layer(x) + self.experts[choice % 3](x)


class Odd(nn.Module):
    """A model with parameters smaller than the number of ranks, without elements, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 7)
        self.scale, self.nothing = nn.Parameter(torch.ones(1)), nn.Parameter(torch.empty(0))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7)) for _ in "12")
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale + self.nothing.sum()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Wide(nn.Module):
    """A model large enough for bytes to be counted."""

    def __init__(self, width: int = 96, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(rank: int, number: int) -> Tensor:
    """Draw a batch: another one on each rank, of another size."""
    draw = torch.Generator().manual_seed(SEED + 1000 * rank + number)
    return torch.randint(WORDS, (2 + rank, 9), generator=draw)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch[:, :-1])
    return functional.cross_entropy(out.reshape(-1, WORDS), batch[:, 1:].reshape(-1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int = 20,
    micro: int = 1,
    syncs: bool = True,
    clip: Callable[[Iterable[Tensor]], object] | None = None,
) -> list[float]:
    """Train, and return the losses.

    micro: batches a step.
    syncs: whether gradients are reduced after each of them, or only after the last.
    """
    losses = []
    for step in range(steps):
        for part in range(micro):
            waits = not syncs and part + 1 < micro
            with model.no_sync() if waits else nullcontext():
                loss = loss_of(model, tokens(rank, step * micro + part))
                loss.backward()
            losses.append(loss.item())
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Averaged(nn.Module):
    """A reference for DistributedDataParallel that adds in the order of ranks, batch by batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.module(batch)

    def average(self, before: list[Tensor | None]) -> None:
        params = list(self.module.parameters())
        for param, sums, mean in zip(params, before, means(params), strict=True):
            param.grad = sums if mean is None else mean if sums is None else sums + mean


def means(params: list[nn.Parameter]) -> list[Tensor | None]:
    """Return the means of the gradients over the ranks, added in their order, in host memory.

    A missing gradient counts as zero; the mean is None if no rank has one.
    """
    count = dist.get_world_size()
    grads = [torch.zeros(p.shape) if p.grad is None else p.grad.cpu() for p in params]
    mine = torch.cat([grad.flatten() for grad in grads])
    there = torch.tensor([float(p.grad is not None) for p in params])
    each, having = ([torch.empty_like(one) for _ in range(count)] for one in (mine, there))
    dist.all_gather(each, mine)
    dist.all_gather(having, there)
    total = each[0] / count
    for one in each[1:]:
        total = total + one / count
    parts = total.split([p.numel() for p in params])
    used = torch.stack(having).sum(0).tolist()
    return [
        part.view(p.shape).clone() if any_ else None
        for p, part, any_ in zip(params, parts, used, strict=True)
    ]


def train_averaged(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, micro: int = 1
) -> list[float]:
    averaged, losses = Averaged(model), []
    for step in range(steps):
        sums: list[Tensor | None] = [None for _ in model.parameters()]
        for part in range(micro):
            optimizer.zero_grad()
            loss = loss_of(averaged, tokens(rank, step * micro + part))
            loss.backward()
            averaged.average(sums)
            sums = [param.grad for param in model.parameters()]
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def seeded(make: Model) -> nn.Module:
    torch.manual_seed(SEED)
    return make()


def in_ddp(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True)


def made_of(model: nn.Module) -> Prepared:
    found = prepared_of(model)
    assert found is not None
    return found


def check_same(name: str, model: nn.Module, plain: nn.Module) -> None:
    """Raise AssertionError unless the gathered state of the model equals that of the plain one."""
    found = model.state_dict()
    for key, values in plain.state_dict().items():
        assert torch.equal(values, found[key]), f"{name}: {key} differs"


def clip_in_double(params: Iterable[Tensor]) -> Tensor:
    """Clip as torch does, but add squares in double."""
    grads = [p.grad for p in params if p.grad is not None]
    norms = [grad.double().square().sum().sqrt().to(grad.dtype) for grad in grads]
    total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    factor = torch.clamp(0.5 / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return total


def clip(params: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, 0.5)
