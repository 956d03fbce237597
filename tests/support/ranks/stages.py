"""Models, data and loops for tests of optimizers that are sharded over ranks (stages 1 and 2).
Functions that take a rank run in a process each (`launch.run`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import offload
from offload.distributed.ranks import Ranks

VOCAB, DIM, LENGTH = 67, 24, 9


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.squeeze(1))


class Block(nn.Module):
    def __init__(self, feed: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.feed = nn.LayerNorm(DIM), Attention(), feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


class Experts(nn.Module):
    """A layer of five experts that runs one or two of them, chosen by the rank and the turn; one
    never runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(5))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        rank, self.turn = dist.get_rank(), self.turn + 1
        one, other = self.experts[rank % 2], self.experts[(rank + self.turn) % 4]  # never the fifth
        return one(x) + other(x)


class Adapted(nn.Module):
    """A LoRA layer: a frozen linear layer and a product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Gpt(nn.Module):
    """A GPT whose head is its embedding."""

    def __init__(self, feed: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(*(Block(feed()) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.blocks(self.embedding(tokens)) @ self.embedding.weight.t()
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> nn.Module:
    return Gpt(mlp)


def experts() -> nn.Module:
    return Gpt(Experts)


def lora() -> nn.Module:
    model = Gpt(Adapted)
    for name, param in model.named_parameters():
        param.requires_grad_("down" in name or "up" in name)
    return model


class Wide(nn.Module):
    """A model with enough state for a drive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, 301), nn.Linear(301, 517), nn.Linear(517, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens.to(self.layers[0].weight.dtype) / VOCAB).square().mean()


def tokens(rank: int, turn: int) -> Tensor:
    """Draw a batch: ranks have batches of different sizes."""
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    return torch.randint(VOCAB, (2 + rank, LENGTH), generator=generator)


@dataclass
class Loop:
    """A training, the same with the engine and without. stage: 0 is plain torch in DDP."""

    stage: int
    make: Callable[[], nn.Module] = gpt
    dtype: torch.dtype = torch.float32
    micro: int = 1
    clip: float | None = None  # by torch's function
    settings: dict[str, Any] = field(default_factory=dict)  # of wrap
    reduced_by: Ranks | None = None  # instead of DDP, for stage 1
    turn: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.model = self.make().to(self.dtype)
        uses_ddp = self.stage < 2 and self.reduced_by is None
        unused = self.make is experts
        self.runs: Any = DDP(self.model, find_unused_parameters=unused) if uses_ddp else self.model
        # Gradients that are zero but for rounding (of keys' biases) must not become steps of lr.
        self.optimizer: Any = torch.optim.AdamW(self.groups(), lr=1e-2, eps=1e-4, fused=True)
        if self.stage:
            offload.wrap(self.optimizer, release_grads=self.stage == 2, **self.settings)

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.model.named_parameters())
        return [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def step(self) -> list[Tensor]:
        """Take a step; return the losses of all micro-batches."""
        losses = []
        for micro in range(self.micro):
            is_last = micro == self.micro - 1
            with nullcontext() if is_last else self.holder.no_sync():
                loss = self.runs(tokens(dist.get_rank(), 10 * self.turn + micro))
                loss.backward()
            losses.append(loss.detach())
        if self.reduced_by is not None:
            reduce(self.model, self.reduced_by)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.turn += 1
        return losses

    @property
    def holder(self) -> Any:
        if self.reduced_by is not None:
            return _NoSync()
        return self.optimizer if self.stage == 2 else self.runs

    @property
    def trained(self) -> list[Tensor]:
        return [param for param in self.model.parameters() if param.requires_grad]

    @property
    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


class _NoSync:
    def no_sync(self) -> Any:
        return nullcontext()


def reduce(model: nn.Module, ranks: Ranks) -> None:
    """Average all gradients as the engine does; zeros for those that another rank has."""
    params = list(model.parameters())
    having = ranks.exchange([param.grad is not None for param in params], "which")
    some = [p for number, p in enumerate(params) if any(one[number] for one in having)]
    if not some:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
    flat = torch.cat([grad.flatten() for grad in grads])
    means = mean(flat, ranks).split([param.numel() for param in some])
    for param, one in zip(some, means, strict=True):
        param.grad = torch.empty_like(param).copy_(one.view(param.shape)).detach()


def mean(grad: Tensor, ranks: Ranks) -> Tensor:
    numel = -(-grad.numel() // ranks.count)
    whole = torch.zeros(numel * ranks.count, dtype=grad.dtype)
    whole[: grad.numel()] = grad
    own = torch.empty(numel, dtype=grad.dtype)
    ranks.reduce_scatter(own, whole, "gradients").wait()
    ranks.gather(whole, own, "gradients").wait()
    return whole[: grad.numel()]


def furthest(left: list[Tensor], right: list[Tensor]) -> float:
    """Return the largest difference of two elements."""
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
