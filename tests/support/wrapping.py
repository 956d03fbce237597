"""Parameters, gradients from a seed, and budgets, for tests of wrapped optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import offload

SIZES = ((70, 30), (5,), (40, 40), (3, 7))


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return new parameters, always with the same values."""
    return [nn.Parameter(tensor) for tensor in tensors(0, dtype)]


def give_gradients(params: Sequence[Tensor], turn: int) -> None:
    for param, grad in zip(params, tensors(turn + 1), strict=False):
        param.grad = grad.to(param.dtype)


def train(params: Sequence[Tensor], optimizer: Any, *turns: int) -> None:
    for turn in turns:
        give_gradients(params, turn)
        optimizer.step()


def tight(optimizer: Optimizer, directory: Path) -> dict[str, Any]:
    """Return a budget of three buffers: most of the state is on the drive."""
    largest = max(chunk.nbytes for chunk in offload.plan(optimizer).chunks)
    return {"host_memory": 3 * largest, "nvme": directory}


def adamw(params: Sequence[Tensor], directory: Path | None = None, **settings: Any) -> Any:
    """Return a wrapped AdamW; with a directory most of its state is there."""
    optimizer = AdamW(params, **{"lr": 1e-2, "fused": True, **settings})
    return offload.wrap(optimizer, **(tight(optimizer, directory) if directory else {}))
