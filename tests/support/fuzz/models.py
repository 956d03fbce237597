"""The model of a case, of small layers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from support.fuzz.cases import Layer, Model
from support.models import Adapted
from support.models import Layer as Attention


class Trouble(Exception):
    """An error that a layer of the user's model raises."""


class Switch:
    """A switch that makes one layer fail, in its forward or in its backward."""

    def __init__(self) -> None:
        self.where, self.when = -1, ""

    def trip(self, number: int, x: Tensor) -> Tensor:
        if number == self.where and self.when == "forward":
            raise Trouble(f"layer {number}")
        return _Broken.apply(x) if number == self.where and self.when == "backward" else x


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Trouble("backward")


class Block(nn.Module):
    """A layer with a residual around it. others: the layers before it."""

    def __init__(
        self, number: int, spec: Layer, model: Model, switch: Switch, others: list[Block]
    ) -> None:
        super().__init__()
        self.number, self.spec, self.switch = number, spec, switch
        # Some operators have no 16-bit form on the CPU.
        own = "float32" if spec.kind in ("batch", "conv") else spec.dtype or model.dtype
        self.dtype: torch.dtype = getattr(torch, own)
        self.others: Callable[[], list[Block]] = lambda: others  # not as modules of its own
        getattr(self, f"make_{spec.kind}", self.make_nothing_of_its_own)(model.width, spec.size)
        self.to(self.dtype)
        if spec.is_frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.switch.trip(self.number, x.to(self.dtype))
        y = getattr(self, f"run_{self.spec.kind}")(y)
        y = functional.dropout(y, self.spec.dropout, self.training)
        return x + y.to(x.dtype)

    def make_nothing_of_its_own(self, width: int, size: int) -> None:
        return None

    def make_linear(self, width: int, size: int) -> None:
        self.inner = nn.Linear(width, width, bias=size % 2 == 1)

    def run_linear(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def make_mlp(self, width: int, size: int) -> None:
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width)

    def run_mlp(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(self.norm(x))))

    def make_attention(self, width: int, size: int) -> None:
        self.inner = Attention(width)

    run_attention = run_linear

    def make_norm(self, width: int, size: int) -> None:
        self.inner = nn.LayerNorm(width)

    run_norm = run_linear

    def make_batch(self, width: int, size: int) -> None:
        self.inner = nn.BatchNorm1d(width)

    def run_batch(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, -2)).view_as(x)

    def make_experts(self, width: int, size: int) -> None:
        count = 2 + size % 3
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def run_experts(self, x: Tensor) -> Tensor:
        """Run the expert that the data choose, row by row."""
        return torch.cat([self.experts[_choice(row, len(self.experts))](row) for row in x.split(1)])

    make_branch = make_mlp

    def run_branch(self, x: Tensor) -> Tensor:
        return self.run_mlp(x) if _choice(x, 2) else x * 0.5

    def make_nested(self, width: int, size: int) -> None:
        inner = nn.Sequential(nn.Linear(width, size), nn.Tanh())
        self.inner = nn.Sequential(inner, nn.Linear(size, width))

    run_nested = run_linear

    def make_adapter(self, width: int, size: int) -> None:
        self.inner = Adapted(nn.Linear(width, width), rank=size)

    run_adapter = run_linear

    def make_scale(self, width: int, size: int) -> None:
        self.scale = nn.Parameter(torch.ones(width))
        self.number_of_its_own = nn.Parameter(torch.ones(()))

    def run_scale(self, x: Tensor) -> Tensor:
        return x * self.scale * self.number_of_its_own

    def make_nothing(self, width: int, size: int) -> None:
        self.empty = nn.Parameter(torch.empty(0, size))
        self.inner = nn.Linear(width, width)

    def run_nothing(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.empty.sum().to(x.dtype)

    def make_never(self, width: int, size: int) -> None:
        self.never, self.inner = nn.Linear(size, width), nn.Linear(width, width)

    run_never = run_linear

    def make_conv(self, width: int, size: int) -> None:
        self.inner = nn.Conv1d(width, width, 3, padding=1)

    def run_conv(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(-1, -2)).transpose(-1, -2)

    def run_again(self, x: Tensor) -> Tensor:
        return self.others()[self.spec.target](x)

    def run_borrow(self, x: Tensor) -> Tensor:
        """Use a weight of another unit, whose module does not run."""
        for param in self.others()[self.spec.target].parameters():
            if param.ndim == 2 and param.shape == (x.shape[-1], x.shape[-1]):
                return functional.linear(x, param.to(x.dtype))
            if param.numel():
                return x * param.sum().to(x.dtype)
        return x


def _choice(x: Tensor, count: int) -> int:
    return int(torch.nan_to_num(x.detach().float().sum() * 100).clamp(-1e6, 1e6)) % count


class Drawn(nn.Module):
    """An embedding, the layers, a head."""

    def __init__(self, spec: Model, switch: Switch) -> None:
        super().__init__()
        self.spec, self.switch = spec, switch
        dtype = getattr(torch, spec.dtype)
        self.embedding = nn.Embedding(spec.words, spec.width, dtype=dtype)
        blocks: list[Block] = []
        for number, layer in enumerate(spec.layers):
            blocks.append(Block(number, layer, spec, switch, blocks))
        self.layers = nn.Sequential(*blocks) if spec.is_sequential else nn.ModuleList(blocks)
        self.head = nn.Linear(spec.width, spec.words, bias=False, dtype=dtype)
        if spec.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.spec.segments and torch.is_grad_enabled():
            x = checkpoint_sequential(self.layers, self.spec.segments, x, use_reentrant=False)
        elif self.spec.is_sequential:
            x = self.layers(x)
        else:
            for layer in self.layers:
                x = self.run(layer, x)
        return self.head(x)

    def run(self, layer: Any, x: Tensor) -> Tensor:
        again = layer.spec.again if torch.is_grad_enabled() else ""
        return checkpoint(layer, x, use_reentrant=again == "reentrant") if again else layer(x)


def build(spec: Model, seed: int = 5) -> Drawn:
    """Build the model of a case, with the values of a seed. torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Drawn(spec, Switch())
    if spec.is_transposed:
        _transpose(model)
    return model


def _transpose(model: nn.Module) -> None:
    for param in model.parameters():
        if param.ndim == 2:
            param.data = param.data.t().contiguous().t()


def batch(spec: Model, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    size = (1 + number % 3, 2 + number % 4)
    return torch.randint(0, spec.words, size, generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).float().square().mean()
