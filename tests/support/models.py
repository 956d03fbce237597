"""Models of every kind for tests of tiered parameters, with their batches and their loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 40, 16


class Layer(nn.Module):
    """A transformer layer: attention and an MLP.

    again: `use_reentrant` of activation checkpointing of the attention; None: without.
    """

    def __init__(self, width: int = WIDTH, again: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.again, self.dropout = again, dropout

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(self.norm1(x)).chunk(3, dim=-1)
        mixed = torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        return functional.dropout(self.output(mixed), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.again is None or not torch.is_grad_enabled():
            x = x + self.attend(x)
        else:
            x = x + checkpoint(self.attend, x, use_reentrant=self.again)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT with tied embeddings.

    inside, around: `use_reentrant` of activation checkpointing within layers, or of whole layers;
    None: without.
    """

    def __init__(
        self,
        layers: int = 4,
        inside: bool | None = None,
        around: bool | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(again=inside, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.around = around

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            again = self.around if torch.is_grad_enabled() else None
            x = layer(x) if again is None else checkpoint(layer, x, use_reentrant=again)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.narrow = nn.Linear(base.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.wide(self.narrow(x))


class Lora(Gpt):
    """A GPT of which only adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            for name in ("inputs", "up"):
                setattr(layer, name, Adapted(getattr(layer, name)))


class Thrice(nn.Module):
    """A model that uses one layer three times, one once and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in (0, 1, 0, 0):
            x = self.layers[number](x)
        return self.head(x)


class Experts(nn.Module):
    """A mixture of experts; the data decide which of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        weights = torch.softmax(self.gate(x.mean(dim=1)), dim=-1)
        rows = []
        for row in range(len(x)):
            best = int(weights[row].argmax())
            rows.append(self.experts[best](x[row : row + 1]) * weights[row, best])
        return self.head(torch.cat(rows))


class Branches(nn.Module):
    """A model that skips layers at random, by a generator of its own.

    Weights are also used without their modules, and some several times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.head = nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.draw = torch.Generator().manual_seed(5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.embedding(tokens, self.embedding.weight) * self.scale
        for layer in self.layers:
            if torch.rand((), generator=self.draw) < 0.6:
                x = layer(x)
        x = x + x @ self.layers[0].output.weight.t() @ self.layers[1].output.weight
        return functional.linear(x, self.head.weight, self.head.bias)


class Pictures(nn.Module):
    """A small ResNet with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.stages = nn.Sequential(*(_Residual(8) for _ in range(3)))
        self.last = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float().view(len(tokens), 1, 2, -1) / WORDS
        return self.last(self.stages(self.first(x)).mean(dim=(2, 3)))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(inner)))


class Encoder(nn.Module):
    """A model of torch's own layers, which use weights of modules that they do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.lonely = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens))
        return self.head(self.lonely(x, x, x, need_weights=False)[0].mean(dim=1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "dropout": lambda: Gpt(dropout=0.3),
    "inside": lambda: Gpt(inside=False),
    "inside_reentrant": lambda: Gpt(inside=True),
    "around": lambda: Gpt(around=False),
    "around_reentrant": lambda: Gpt(around=True),
    "lora": Lora,
    "thrice": Thrice,
    "experts": Experts,
    "branches": Branches,
    "pictures": Pictures,
    "encoder": Encoder,
}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]().to(dtype)
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            # With any hook these evaluate by another kernel, with other last bits.
            module.register_forward_pre_hook(lambda *_: None)
    return model


def batch(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (3, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).float().square().mean()
