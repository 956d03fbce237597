"""Adapters of low rank (LoRA) beside the matrices of a frozen model, as fine-tuning has them: to
forecast their training, they need shapes only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError


class Adapted(nn.Module):
    """A frozen matrix with an adapter of low rank beside it."""

    def __init__(self, frozen: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        like = next(frozen.parameters())
        self.frozen = frozen
        self.down = nn.Linear(inputs, rank, bias=False, device=like.device, dtype=like.dtype)
        self.up = nn.Linear(rank, outputs, bias=False, device=like.device, dtype=like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.up(self.down(x))
        return y


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze the model, and put an adapter beside each matrix of its repeated layers. Raises
    `ConfigError` if it has none.
    """
    for param in model.parameters():
        param.requires_grad_(False)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    matrices = [
        (owner, name, child)
        for layers in lists
        for owner in layers.modules()
        for name, child in owner.named_children()
        if _sizes(child) is not None
    ]
    if not matrices:
        raise ConfigError("lora: the model has no linear layer in a list of layers to adapt")
    with torch.device("meta"):
        for owner, name, child in dict.fromkeys(matrices):
            inputs, outputs = _sizes(child) or (0, 0)
            if getattr(owner, name) is child:  # lists in lists find it twice
                setattr(owner, name, Adapted(child, inputs, outputs, rank))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of features that go in and come out; None: it is no such matrix."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's, of transformers
        inputs, outputs = module.get_parameter("weight").shape
        return inputs, outputs
    return None
